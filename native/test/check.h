// The native tests' own few lines of framework: TEST(name) { CHECK(expr); CHECK_EQ(a, b); }
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace p2pkv::test {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

// Failed checks of the test that runs; atomic because tests check in threads too.
inline std::atomic<int> failures{0};

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};
struct FirstRegistration {
  FirstRegistration(const char* name, void (*run)()) { tests().insert(tests().begin(), {name, run}); }
};

// Not inline: every check would have its code, and sanitizers multiply it.
[[gnu::cold]] void fail(const char* file, int line, const char* what);
[[gnu::cold]] void fail(const char* file, int line, const char* what, const std::string& why);

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* what, const char* file, int line) {
  if (a == b) return;
  fail(file, line, what, ": " + std::to_string(a) + " is not " + std::to_string(b));
}

}  // namespace p2pkv::test

#define TEST(name)                                                                  \
  static void test_##name();                                                        \
  static const ::p2pkv::test::Registration registration_##name(#name, test_##name); \
  static void test_##name()

// This is for tests that fork children which make threads: they run before all others, so that none of these
// has left a thread. TSan ends a child whose thread gets the stack, and so the name, of one that only its
// parent has.
#define TEST_FIRST(name)                                                                 \
  static void test_##name();                                                             \
  static const ::p2pkv::test::FirstRegistration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(expression)                                                               \
  do {                                                                                  \
    if (!(expression)) ::p2pkv::test::fail(__FILE__, __LINE__, "not so: " #expression); \
  } while (false)

// For numbers: values are printed as such when they differ.
#define CHECK_EQ(a, b) ::p2pkv::test::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
