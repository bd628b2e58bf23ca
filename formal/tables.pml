/* Generated from app/core/lifecycle.py by `python -m formal tables`: do not edit. */

mtype = { PARKED, BOOTSTRAPPING, WAITING, TRANSFERRING, METADATA, DECODING, DRAINING, SUCCESS, FAILED };
mtype = { REQUEST, DESTINATION, ADMIT, ANNOUNCED, LANDED, TOLD, READ, FINISH, FAIL, DRAINED };

c_decl {
static unsigned char used[36];
static void say_used(void)
{
	int entry;
	for (entry = 0; entry < 36; entry++)
		if (used[entry])
			printf("used %d\n", entry);
}
}

inline note_used() { c_code { atexit(say_used); } }

inline advance_prefill(life, event) {
    if
    :: life == PARKED && event == REQUEST -> c_code { used[0] = 1; }; life = WAITING
    :: life == PARKED && event == FAIL -> c_code { used[1] = 1; }; life = FAILED
    :: life == BOOTSTRAPPING && event == DESTINATION -> c_code { used[2] = 1; }; life = WAITING
    :: life == BOOTSTRAPPING && event == FAIL -> c_code { used[3] = 1; }; life = DRAINING
    :: life == WAITING && event == ADMIT -> c_code { used[4] = 1; }; life = TRANSFERRING
    :: life == WAITING && event == FAIL -> c_code { used[5] = 1; }; life = DRAINING
    :: life == TRANSFERRING && event == LANDED -> c_code { used[6] = 1; }; life = METADATA
    :: life == TRANSFERRING && event == FAIL -> c_code { used[7] = 1; }; life = DRAINING
    :: life == METADATA && event == TOLD -> c_code { used[8] = 1; }; life = SUCCESS
    :: life == METADATA && event == FAIL -> c_code { used[9] = 1; }; life = DRAINING
    :: life == DRAINING && event == FAIL -> c_code { used[10] = 1; }; life = DRAINING
    :: life == DRAINING && event == LANDED -> c_code { used[11] = 1; }; life = DRAINING
    :: life == DRAINING && event == TOLD -> c_code { used[12] = 1; }; life = DRAINING
    :: life == DRAINING && event == DRAINED -> c_code { used[13] = 1; }; life = FAILED
    :: life == FAILED && event == FAIL -> c_code { used[14] = 1; }; life = FAILED
    :: life == FAILED && event == LANDED -> c_code { used[15] = 1; }; life = FAILED
    :: life == FAILED && event == TOLD -> c_code { used[16] = 1; }; life = FAILED
    :: life == FAILED && event == DRAINED -> c_code { used[17] = 1; }; life = FAILED
    :: life == SUCCESS && event == FAIL -> c_code { used[18] = 1; }; life = SUCCESS
    :: else -> assert(false) /* an illegal event */
    fi
}

inline advance_decode(life, event) {
    if
    :: life == BOOTSTRAPPING && event == ANNOUNCED -> c_code { used[19] = 1; }; life = WAITING
    :: life == BOOTSTRAPPING && event == FAIL -> c_code { used[20] = 1; }; life = DRAINING
    :: life == WAITING && event == LANDED -> c_code { used[21] = 1; }; life = METADATA
    :: life == WAITING && event == FAIL -> c_code { used[22] = 1; }; life = DRAINING
    :: life == METADATA && event == READ -> c_code { used[23] = 1; }; life = DECODING
    :: life == METADATA && event == FAIL -> c_code { used[24] = 1; }; life = DRAINING
    :: life == DECODING && event == FINISH -> c_code { used[25] = 1; }; life = SUCCESS
    :: life == DECODING && event == FAIL -> c_code { used[26] = 1; }; life = DRAINING
    :: life == DRAINING && event == FAIL -> c_code { used[27] = 1; }; life = DRAINING
    :: life == DRAINING && event == LANDED -> c_code { used[28] = 1; }; life = DRAINING
    :: life == DRAINING && event == TOLD -> c_code { used[29] = 1; }; life = DRAINING
    :: life == DRAINING && event == DRAINED -> c_code { used[30] = 1; }; life = FAILED
    :: life == FAILED && event == FAIL -> c_code { used[31] = 1; }; life = FAILED
    :: life == FAILED && event == LANDED -> c_code { used[32] = 1; }; life = FAILED
    :: life == FAILED && event == TOLD -> c_code { used[33] = 1; }; life = FAILED
    :: life == FAILED && event == DRAINED -> c_code { used[34] = 1; }; life = FAILED
    :: life == SUCCESS && event == FAIL -> c_code { used[35] = 1; }; life = SUCCESS
    :: else -> assert(false) /* an illegal event */
    fi
}
