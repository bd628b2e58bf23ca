// What a processor may have beyond what every x86-64 has. The library runs on all of them and picks at run time.
#pragma once

#if defined(__x86_64__)
// A function of its own for processors with these; called only where use_vectors is set. A lambda inside it does
// not get the attribute.
#define KVFERRY_VECTORS __attribute__((target("avx2,bmi,popcnt")))
#define KVFERRY_HAS_VECTORS 1
#else
#define KVFERRY_VECTORS
#define KVFERRY_HAS_VECTORS 0
#endif

// For a body that is compiled twice: it is built for whatever the function around it is built for.
#define KVFERRY_INLINE [[gnu::always_inline]] inline

namespace kvferry {

// Whether this processor has them. A variable, so that the tests can run the other branch as well.
#if KVFERRY_HAS_VECTORS
inline bool use_vectors =
    __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
#else
inline bool use_vectors = false;
#endif

}  // namespace kvferry
