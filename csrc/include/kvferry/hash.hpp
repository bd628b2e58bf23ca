// Chained page hashes: where to look for a page of tokens, never proof that it is the right one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry {

// A borrowed array of token ids, int64 or int32, read as it stands.
struct Tokens {
  const void* data = nullptr;
  std::size_t size = 0;
  bool wide = true;  // int64, else int32

  Tokens() = default;
  explicit Tokens(std::span<const std::int64_t> tokens) : data(tokens.data()), size(tokens.size()) {}
  explicit Tokens(std::span<const std::int32_t> tokens) : data(tokens.data()), size(tokens.size()), wide(false) {}

  const std::int64_t* as64() const { return static_cast<const std::int64_t*>(data); }
  const std::int32_t* as32() const { return static_cast<const std::int32_t*>(data); }
};

// Hash of `count` tokens from `at`. Fixed seeds: equal in every process and for both widths.
std::uint64_t hash_run(const Tokens& tokens, std::size_t at, std::size_t count);

// The hash of a page and of everything before it.
std::uint64_t chain(std::uint64_t before, std::uint64_t page);

// How many of the `count` tokens from `at` equal `stored`, counted from the front. A token that does not
// fit into int32 equals nothing.
std::size_t equal_run(const std::int32_t* stored, const Tokens& tokens, std::size_t at, std::size_t count);

// Copies `count` tokens from `at` to `out`; the first index (in tokens) that is negative or above int32, or
// tokens.size when all are good.
std::size_t narrow(std::int32_t* out, const Tokens& tokens, std::size_t at, std::size_t count);

// Whose KV it is. Prompts of two namespaces never share a page.
//
// Each part is written with its length before it ("ab","c" differs from "a","bc"), and an absent part
// differs from an empty one. `bigrams` keys position p by the tokens p and p + 1, which is what a draft row
// depends on: a prompt of n tokens then has n - 1 keys. It is a part of the key as well.
struct Namespace {
  std::string key;
  std::uint64_t seed = 0;  // where the chain of its page hashes starts
  bool bigrams = false;

  Namespace(std::span<const std::optional<std::string>> parts, bool bigrams);

  std::size_t lookahead() const { return bigrams ? 1 : 0; }
  std::size_t keys(const Tokens& tokens) const {
    return tokens.size > lookahead() ? tokens.size - lookahead() : 0;
  }
};

// The chained hash of every page of a prompt, its valid tail included.
std::vector<std::uint64_t> page_keys(const Namespace& space, const Tokens& tokens, std::size_t page_size);

}  // namespace kvferry
