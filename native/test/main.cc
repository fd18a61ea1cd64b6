// Runs the native tests whose name contains the argument, or all; exits with 1 if any failed or none was
// found.
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  using p2pkv::test::failures;
  int n_passed = 0;
  int n_failed = 0;
  for (const auto& test : p2pkv::test::tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    failures = 0;
    test.run();
    const bool passed = failures == 0;
    ++(passed ? n_passed : n_failed);
    std::cout << (passed ? "ok      " : "FAILED  ") << test.name << std::endl;
  }
  std::cout << n_passed << " passed, " << n_failed << " failed" << std::endl;
  return n_failed > 0 || n_passed == 0;
}
