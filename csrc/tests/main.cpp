// The C++ tests: what a binding would hide. `kvferry_tests --help` lists the options of the library.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
