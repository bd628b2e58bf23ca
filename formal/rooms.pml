/* Two rooms between a prefill and a decode node: announcement, three chunks, completion, abort, drain.

   docs/protocol.md says what is modelled, what is assumed and what the variants (-D) are. The lives of
   both sides change by tables.pml alone, which is generated from app/core/lifecycle.py.

   Every process is a loop of guarded steps. A step is indivisible, as a callback of the event loop is.
   Time passes in ticks, which count timers down. Deadlines that safety does not rest on (for an answer, a
   turn, the last byte) may pass at any moment, which covers every setting of theirs. */

#include "tables.pml"

#ifdef SAME
#define NUMBER(r) 0
#else
#define NUMBER(r) (r)
#endif

#define CHUNKS 3
#define SENT_ALL (CHUNKS + 1) /* the metadata record is the last write */
#define LANDED_ALL (CHUNKS + 2)
#ifndef REPEATS
#define REPEATS 1
#endif

/* Ticks. A write has ended, well or not, before the tick after its submit: transfer.deadline_s. */
#define LATE 1                /* one that was repeated or has failed may still land: transfer.late_landing_s */
#define CONFIRMED 1           /* LEASE: how long decode's word counts */
#ifdef SHORT_HOLD
#define HOLD 0
#elif defined(LEASE)
#define HOLD (CONFIRMED + LATE)
#else
#define HOLD LATE             /* deadlines.quarantine_s; the settings refuse one that is not longer than both */
#endif

#define RUNNING 0
#define STOPPING 1
#define GONE 2

#define NOTHING 0
#define YES 1
#define NO 2

/* ---------------------------------------------------------------- the world */
bool calm;                             /* from here on nothing happens that does not have to */
byte repeats;                          /* messages that may still arrive twice */
bool prefill_gets[2], decode_gets[2];  /* the router's request is still to come */

/* ---------------------------------------------------------------- the network: copies still on their way */
byte destination[2], complete[2], failed[2], abort[2];
bool generation[2];                    /* in the abort: decode had named its pages */
byte settle[2];                        /* in complete: ticks in which a repeated write may still land */
byte complete_answer[2];
bool abort_answer[2];                  /* the drain is proven; whatever else it says changes nothing */

/* ---------------------------------------------------------------- the engine: writes of each room */
byte flying[2];                        /* submitted, not ended */
byte landing[2];                       /* ticks in which one that has ended may land */
bool broken[2];                        /* one has failed for good */

/* ---------------------------------------------------------------- prefill, by room number */
byte prefill_node;
mtype prefill[2];
bool prefill_live[2];                  /* in the room table */
byte asked_by[2], wanted_by[2];        /* 1 + room whose request, whose pages these are; 0: none yet */
byte sent[2];
bool prefill_holds[2];
byte prefill_left[2];
bool unproven[2];
bool tombstone[2];
bool served[2], over[2];               /* by room, that is by decode's instance and generation: told; failed */
bool abort_waits[2];                   /* by room: it is answered when the number is free */
byte turn;                             /* 1 + number whose forward runs */
byte prefill_pool;                     /* 1 + number that has the pages; they are enough for one room */
byte confirmed[2], confirmations[2];

/* ---------------------------------------------------------------- decode, by room */
byte decode_node;
mtype decode[2];
bool decode_live[2];
bool announced[2], accepted[2], delivered[2];
bool drain_holds[2], late_holds[2];
byte decode_left[2];
byte settling[2];
byte decode_pool;                      /* 1 + room that has the pages; they are enough for one */
#ifdef SAME
byte last_ended[2];                    /* by number: 1 + room that was cleared last */
#define ENDED_LAST(r) (last_ended[NUMBER(r)] - 1)
#else
#define ENDED_LAST(r) r
#endif

#ifdef FORGET
#define HEARS(r) decode_live[r]
#else
#define HEARS(r) true
#endif
#define FAILING(life) (life == DRAINING || life == FAILED)
#define CAN_LAND(r) (flying[r] || landing[r])
#define LIVE_AT_DECODE(n) ((NUMBER(0) == n && decode_live[0]) || (NUMBER(1) == n && decode_live[1]))

/* Prefill may submit writes of this room, now or after a message that is on its way. */
#define MAY_SEND(r) (prefill_node != GONE && (destination[r] || (prefill_live[NUMBER(r)] && \
    wanted_by[NUMBER(r)] == r + 1 && (prefill[NUMBER(r)] == PARKED || prefill[NUMBER(r)] == WAITING || \
    prefill[NUMBER(r)] == TRANSFERRING))))

#ifdef LEASE
#define MAY_SUBMIT(n) confirmed[n]
#else
#define MAY_SUBMIT(n) true
#endif

#if defined(LEASE) || defined(UNHEARD)
#define HOLD_COUNTS(r) (decode_left[r])
#else
/* the hold outlives by HOLD whatever prefill may still send */
#define HOLD_COUNTS(r) (decode_left[r] && !(drain_holds[r] && MAY_SEND(r)))
#endif

/* ---------------------------------------------------------------- prefill's doing */

inline answer_abort(n, r, proven) {
    if
    :: NUMBER(r) == n && abort_waits[r] -> abort_waits[r] = false; abort_answer[r] = proven && drain_holds[r]
    :: else
    fi
}

inline prefill_free(n, proven) {
    if
    :: wanted_by[n] ->
        assert(!CAN_LAND(wanted_by[n] - 1)); /* a write still reads these pages */
        broken[wanted_by[n] - 1] = false
    :: else
    fi;
    if
    :: FAILING(prefill[n]) -> advance_prefill(prefill[n], DRAINED)
    :: else
    fi;
    prefill_pool = (prefill_pool == n + 1 -> 0 : prefill_pool);
    prefill_holds[n] = false; prefill_left[n] = 0; prefill_live[n] = false;
    asked_by[n] = 0; wanted_by[n] = 0; sent[n] = 0; confirmed[n] = 0; confirmations[n] = 0;
    unproven[n] = unproven[n] || !proven;
    answer_abort(n, 0, proven);
    answer_abort(n, 1, proven)
}

/* The first failure ends the room's coroutine: nothing more is submitted, and what it holds drains. */
inline prefill_fail(n, by_decode) {
    if
    :: FAILING(prefill[n]) || prefill[n] == SUCCESS -> advance_prefill(prefill[n], FAIL)
    :: else ->
        advance_prefill(prefill[n], FAIL);
        tombstone[n] = !calm;
        turn = (turn == n + 1 -> 0 : turn);
        if
#ifndef NUMBER_ONLY
        :: wanted_by[n] -> over[wanted_by[n] - 1] = true
        :: else
        fi;
        if
#endif
        :: wanted_by[n] && !by_decode -> failed[wanted_by[n] - 1] = !calm && HEARS(wanted_by[n] - 1)
        :: else
        fi;
        prefill_holds[n] = true; prefill_left[n] = HOLD
    fi
}

inline submit(n) {
    assert(decode_node == GONE || decode_pool == wanted_by[n]); /* decode has given these pages away */
    flying[wanted_by[n] - 1]++;
    sent[n]++
}

inline told(n) {
    advance_prefill(prefill[n], TOLD);
    if
    :: prefill[n] == SUCCESS ->
        served[wanted_by[n] - 1] = true;
        if
        :: landing[wanted_by[n] - 1] -> prefill_holds[n] = true; prefill_left[n] = HOLD
        :: else -> prefill_free(n, true)
        fi
    :: else
    fi
}

#define AT_WORK(n) (prefill_live[n] && prefill[n] == TRANSFERRING)

proctype Prefill(byte n) {
end:
    do
    /* deadlines: parked_s, bootstrap_s, queue_s */
#ifndef NO_PARKED
    :: d_step { prefill_live[n] && prefill[n] == PARKED -> prefill_fail(n, false) }
#endif
    :: d_step { prefill_live[n] && prefill[n] == BOOTSTRAPPING -> prefill_fail(n, false) }
    :: d_step { prefill_live[n] && prefill[n] == WAITING -> prefill_fail(n, false) }

    :: d_step { prefill_live[n] && prefill[n] == WAITING && !turn && !prefill_pool ->
        advance_prefill(prefill[n], ADMIT);
        turn = n + 1; prefill_pool = n + 1
    }
    :: d_step { AT_WORK(n) && sent[n] < CHUNKS && MAY_SUBMIT(n) -> submit(n) }
    :: d_step { AT_WORK(n) && sent[n] == CHUNKS && MAY_SUBMIT(n) -> submit(n); turn = 0 }
#ifdef LEASE
    /* decode says, at one moment, that it still wants the room */
    :: d_step { AT_WORK(n) && sent[n] < SENT_ALL && !confirmed[n] && confirmations[n] < 2 &&
                decode_node != GONE && decode_live[wanted_by[n] - 1] && announced[wanted_by[n] - 1] &&
                !FAILING(decode[wanted_by[n] - 1]) ->
        confirmed[n] = CONFIRMED; confirmations[n]++
    }
    :: d_step { AT_WORK(n) && sent[n] < SENT_ALL && !confirmed[n] -> prefill_fail(n, false) }
#endif
    /* a write has failed */
    :: d_step { AT_WORK(n) && broken[wanted_by[n] - 1] -> prefill_fail(n, false) }
    /* every write has ended well: also of a room that was given up meanwhile */
    :: d_step { prefill_live[n] && sent[n] == SENT_ALL && !flying[wanted_by[n] - 1] &&
                !broken[wanted_by[n] - 1] ->
        sent[n] = LANDED_ALL;
        advance_prefill(prefill[n], LANDED);
        if
        :: prefill[n] == METADATA ->
            complete[wanted_by[n] - 1] = !calm && HEARS(wanted_by[n] - 1);
            settle[wanted_by[n] - 1] = landing[wanted_by[n] - 1]
        :: else
        fi
    }
    /* message_s has passed without an answer to complete */
    :: d_step { prefill_live[n] && prefill[n] == METADATA -> prefill_fail(n, false) }

    /* the drain has ended; or the hold has, unproven */
    :: d_step { prefill_holds[n] && (!wanted_by[n] || !CAN_LAND(wanted_by[n] - 1)) -> prefill_free(n, true) }
    :: d_step { prefill_holds[n] && !prefill_left[n] -> prefill_free(n, false) }

    /* by itself: the client has gone, the model has failed, forward_s has passed */
    :: d_step { !calm && prefill_live[n] && !prefill_holds[n] -> prefill_fail(n, false) }
    /* the node has to stop */
    :: d_step { prefill_node == STOPPING && prefill_live[n] && !prefill_holds[n] -> prefill_fail(n, false) }

    /* tombstone_s has passed */
    :: d_step { !calm && tombstone[n] -> tombstone[n] = false }
    od
}

/* ---------------------------------------------------------------- decode's doing */

/* What changes nothing any more: with FORGET it need not be remembered as being on its way. */
inline forget(r) {
#ifdef FORGET
#ifndef SAME
    failed[r] = 0;
#endif
    complete[r] = 0; abort_answer[r] = false;
    settle[r] = 0
#else
    skip
#endif
}

inline decode_free(r) {
    assert(!CAN_LAND(r)); /* a write may still fill these pages */
    if
    :: FAILING(decode[r]) -> advance_decode(decode[r], DRAINED)
    :: else
    fi;
    decode_pool = (decode_pool == r + 1 -> 0 : decode_pool);
    drain_holds[r] = false; late_holds[r] = false; decode_left[r] = 0; settling[r] = 0;
    decode_live[r] = false; announced[r] = false; accepted[r] = false; delivered[r] = false;
#ifdef SAME
    last_ended[NUMBER(r)] = r + 1;
#endif
    forget(r)
}

/* The first failure ends the room's coroutine: see DecodeRooms.leave. */
inline decode_fail(r) {
    if
    :: FAILING(decode[r]) || decode[r] == SUCCESS -> advance_decode(decode[r], FAIL)
    :: else ->
        advance_decode(decode[r], FAIL);
        generation[r] = announced[r];
        if
        :: announced[r] && !delivered[r] ->
            abort[r] = !calm;
#ifdef FREE_ON_FAIL
            decode_free(r)
#else
            drain_holds[r] = true; decode_left[r] = HOLD
#endif
        :: !announced[r] ->
            abort[r] = !calm;
            decode_free(r)
        :: announced[r] && delivered[r] ->
            if
            :: settling[r] -> late_holds[r] = true; decode_left[r] = settling[r]
            :: else -> decode_free(r)
            fi
        fi
    fi
}

#define HOLDING(r) (drain_holds[r] || late_holds[r])

proctype Decode(byte r) {
end:
    do
    :: d_step { decode_live[r] && decode[r] == BOOTSTRAPPING && !decode_pool ->
        decode_pool = r + 1;
        advance_decode(decode[r], ANNOUNCED);
        announced[r] = true;
        destination[r] = !calm
    }
    /* handshake_s, queue_s */
    :: d_step { decode_live[r] && decode[r] == BOOTSTRAPPING -> decode_fail(r) }
    /* message_s has passed without an answer to the announcement */
    :: d_step { decode_live[r] && !accepted[r] && (decode[r] == WAITING || decode[r] == METADATA) ->
        decode_fail(r)
    }
#ifndef NO_TRANSFER
    /* transfer_s */
    :: d_step { decode_live[r] && decode[r] == WAITING && accepted[r] -> decode_fail(r) }
#endif
    :: d_step { decode_live[r] && decode[r] == METADATA && accepted[r] && !settling[r] ->
        advance_decode(decode[r], READ)
    }
    :: d_step { decode_live[r] && decode[r] == DECODING ->
        advance_decode(decode[r], FINISH);
        decode_free(r)
    }
    /* a hold has ended */
    :: d_step { HOLDING(r) && !decode_left[r] -> decode_free(r) }

    /* by itself: the client has gone, the model has failed, decode_s has passed */
    :: d_step { !calm && decode_live[r] && !HOLDING(r) -> decode_fail(r) }
    /* the node has to stop */
    :: d_step { decode_node == STOPPING && decode_live[r] && !HOLDING(r) -> decode_fail(r) }
    od
}

/* ---------------------------------------------------------------- messages, and who hears them */

inline hear_request(n, r) {
    if
    :: tombstone[n] /* refused with the reason */
    :: else ->
        if
        :: !prefill_live[n] ->
            prefill[n] = BOOTSTRAPPING; prefill_live[n] = true; asked_by[n] = r + 1
        :: prefill_live[n] && prefill[n] == PARKED ->
            advance_prefill(prefill[n], REQUEST); asked_by[n] = r + 1
        :: else /* the number is in use */
        fi
    fi
}

inline hear_destination(n, r, answer) {
    if
    :: tombstone[n] || (over[r] && !served[r]) || (prefill_live[n] && FAILING(prefill[n])) -> answer = NO
    :: else ->
        if
        :: served[r] -> answer = YES
        :: else ->
            if
            :: !prefill_live[n] ->
                prefill[n] = PARKED; prefill_live[n] = true; wanted_by[n] = r + 1; answer = YES
            :: prefill_live[n] && wanted_by[n] == r + 1 -> answer = YES
            :: prefill_live[n] && !wanted_by[n] && prefill[n] == BOOTSTRAPPING ->
                wanted_by[n] = r + 1;
                advance_prefill(prefill[n], DESTINATION);
                answer = YES
            :: else -> answer = NO
            fi
        fi
    fi
}

inline hear_abort(n, r) {
#ifndef NUMBER_ONLY
    over[r] = over[r] || generation[r];
#endif
    if
    :: !prefill_live[n] ->
        tombstone[n] = tombstone[n] || !generation[r] || !served[r];
        abort_answer[r] = drain_holds[r] && !unproven[n]
    :: prefill_live[n] && generation[r] && wanted_by[n] != r + 1 && (served[r] || wanted_by[n]) ->
        abort_answer[r] = drain_holds[r] /* of an earlier use of the number */
    :: else ->
        prefill_fail(n, true);
#ifdef ACK_ON_RECEIPT
        abort_answer[r] = drain_holds[r]
#else
        abort_waits[r] = true
#endif
#ifdef FREE_ON_ABORT
        ; prefill_free(n, true)
#endif
    fi
}

inline hear_complete(r, answer) {
    if
    :: !decode_live[r] ->
        if
        :: decode[r] == FAILED -> advance_decode(decode[r], LANDED)
        :: else
        fi;
        /* a number that is not in the table and ended well hears again what it was told before */
        answer = (!LIVE_AT_DECODE(NUMBER(r)) && decode[ENDED_LAST(r)] == SUCCESS -> YES : NO)
    :: decode_live[r] && (decode[r] == METADATA || decode[r] == DECODING) -> answer = YES
    :: else ->
        advance_decode(decode[r], LANDED);
        if
        :: decode[r] == METADATA -> delivered[r] = true; settling[r] = settle[r]; answer = YES
        :: else -> answer = NO
        fi
    fi
}

/* It names the number only. */
inline hear_failed(n, r) {
    if
    :: NUMBER(r) == n && (decode_live[r] || FAILING(decode[r]) || decode[r] == SUCCESS) -> decode_fail(r)
    :: else
    fi
}

proctype Network(byte r) {
    byte answer;
end:
    do
    :: d_step { prefill_gets[r] && prefill_node == RUNNING ->
        prefill_gets[r] = false;
        hear_request(NUMBER(r), r)
    }
    /* rooms are alike: the first one at decode is called 0 */
    :: d_step { decode_gets[r] && decode_node == RUNNING && (r == 0 || !decode_gets[0]) ->
        decode_gets[r] = false;
        if
        :: LIVE_AT_DECODE(NUMBER(r)) /* the number is in use */
        :: else -> decode[r] = BOOTSTRAPPING; decode_live[r] = true
        fi
    }
    /* its answer may be lost. A refusal ends the room: as waiting in vain would */
    :: d_step { destination[r] && prefill_node != GONE ->
        destination[r]--;
        hear_destination(NUMBER(r), r, answer);
        accepted[r] = accepted[r] || (answer == YES && announced[r]);
        answer = 0
    }
    :: d_step { destination[r] && prefill_node != GONE ->
        destination[r]--;
        hear_destination(NUMBER(r), r, answer);
        answer = 0
    }
    :: d_step { abort[r] && prefill_node != GONE -> abort[r]--;
        hear_abort(NUMBER(r), r);
        generation[r] = generation[r] && abort[r]
    }
    :: d_step { complete[r] && decode_node != GONE ->
        complete[r]--;
        hear_complete(r, answer);
        complete_answer[r] = (wanted_by[NUMBER(r)] == r + 1 && prefill[NUMBER(r)] == METADATA -> answer : NOTHING);
        answer = 0
    }
    :: d_step { failed[r] && decode_node != GONE ->
        failed[r]--;
        hear_failed(NUMBER(r), 0);
        hear_failed(NUMBER(r), 1)
    }

#define TWICE(message) d_step { repeats && message == 1 -> message = 2; repeats-- }
    :: TWICE(destination[r])
    :: TWICE(abort[r])
    :: TWICE(complete[r])
    :: TWICE(failed[r])

    /* answers, perhaps after the end of who asked */
    :: d_step { complete_answer[r] == YES ->
        complete_answer[r] = NOTHING;
        if
        :: (wanted_by[NUMBER(r)] == r + 1 && sent[NUMBER(r)] == LANDED_ALL) || (!prefill_live[NUMBER(r)] && prefill[NUMBER(r)] == FAILED) ->
            told(NUMBER(r))
        :: else
        fi
    }
    :: d_step { complete_answer[r] == NO ->
        complete_answer[r] = NOTHING;
        if
        :: wanted_by[NUMBER(r)] == r + 1 && sent[NUMBER(r)] == LANDED_ALL -> prefill_fail(NUMBER(r), true)
        :: else
        fi
    }
    :: d_step { abort_answer[r] ->
        abort_answer[r] = false;
        if
        :: drain_holds[r] -> decode_free(r)
        :: else -> advance_decode(decode[r], DRAINED)
        fi
    }

    /* lost. For the other messages, to lose them is to deliver them never */
    :: d_step { destination[r] -> destination[r]-- }

    /* the engine: a write lands; lands after an earlier try that may land too; fails, and may land */
    :: d_step { flying[r] ->
        assert(decode_node == GONE || decode_pool == r + 1);
        flying[r]--
    }
    :: d_step { flying[r] -> flying[r]--; landing[r] = LATE }
    :: d_step { flying[r] ->
        flying[r]--; landing[r] = LATE; broken[r] = true
    }
    od
}

/* ---------------------------------------------------------------- time, and the nodes' ends */

#define TIMED(r) (landing[r] || settling[r] || prefill_left[r] || confirmed[r] || HOLD_COUNTS(r))
#define DOWN(timer) timer = (timer -> timer - 1 : 0)

inline tick(r) {
    decode_left[r] = (HOLD_COUNTS(r) -> decode_left[r] - 1 : decode_left[r]);
    DOWN(landing[r]);
    DOWN(settling[r]);
    DOWN(prefill_left[r]);
    DOWN(confirmed[r])
}

inline prefill_dies(r) {
    prefill_live[r] = false; prefill_holds[r] = false; prefill_left[r] = 0; tombstone[r] = false; over[r] = false; served[r] = false;
    asked_by[r] = 0; wanted_by[r] = 0; sent[r] = 0; confirmed[r] = 0; confirmations[r] = 0;
    prefill_gets[r] = false; abort_waits[r] = false; abort[r] = 0; destination[r] = 0; complete_answer[r] = NOTHING;
    if
    :: flying[r] -> flying[r] = 0; landing[r] = LATE /* what has left the process already */
    :: else
    fi
}

inline decode_dies(r) {
    decode_live[r] = false; drain_holds[r] = false; late_holds[r] = false; decode_left[r] = 0;
    settling[r] = 0; announced[r] = false; accepted[r] = false; delivered[r] = false;
    decode_gets[r] = false; complete[r] = 0; failed[r] = 0; abort_answer[r] = false
}

inline silence(r) {
    prefill_gets[r] = false; decode_gets[r] = false;
    destination[r] = 0; abort[r] = 0; complete[r] = 0; failed[r] = 0;
    abort_answer[r] = false; complete_answer[r] = NOTHING; generation[r] = false
}

#define ENDED(r) (!prefill_live[r] && !decode_live[r] && !destination[r])

proctype World() {
    do
    :: d_step { (TIMED(0) || TIMED(1)) && !flying[0] && !flying[1] -> tick(0); tick(1) }
#ifdef STOPS
    :: d_step { !calm && prefill_node == RUNNING -> prefill_node = STOPPING }
#endif
#ifdef STOPS
    :: d_step { !calm && decode_node == RUNNING -> decode_node = STOPPING }
#endif
#ifdef STOPS
    /* killed, or stopped for long enough */
    :: d_step { !calm && prefill_node != GONE ->
        prefill_node = GONE; turn = 0; prefill_pool = 0;
        prefill_dies(0);
        prefill_dies(1)
    }
    :: d_step { !calm && decode_node != GONE ->
        decode_node = GONE; decode_pool = 0;
        decode_dies(0);
        decode_dies(1)
    }
#endif
    :: d_step { !calm ->
        calm = true; repeats = 0;
        silence(0);
        silence(1)
    }
    :: calm && ENDED(0) && ENDED(1) ->
        assert(!turn && !prefill_pool && !decode_pool); /* free = initial */
        break
    od
}

init {
    atomic {
        note_used();
        repeats = REPEATS;
        prefill_gets[0] = true; decode_gets[0] = true;
#ifndef ONE_ROOM
        prefill_gets[1] = true; decode_gets[1] = true;
#endif
        run Prefill(0); run Prefill(1); run Decode(0); run Decode(1); run Network(0); run Network(1); run World()
    }
}
