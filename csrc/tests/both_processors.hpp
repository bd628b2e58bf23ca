// Runs a test with and without the functions for newer processors.
#pragma once

#include "processor.hpp"

template <typename Test>
void on_both_processors(const Test& test) {
  const bool before = kvferry::use_vectors;
  for (const bool wanted : {false, true}) {
    kvferry::use_vectors = wanted && before;
    test();
  }
  kvferry::use_vectors = before;
}
