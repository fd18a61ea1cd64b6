// Runs the native tests whose name contains the argument, or all; exits with 1 if any failed or none was
// found. A test that hangs ends the program, which says its name and where its main thread stood.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "check.h"

namespace {

// The slowest takes 30 s with a sanitizer on a quiet machine; some are three times slower, and busy.
constexpr unsigned MOST_SECONDS = 600;
constexpr double WORTH_SAYING_S = 1.0;

const char* running = "";

// Only what a signal handler may call. The sanitizers show the stack of an abort.
void hung(int) {
  for (const char* text : {"FAILED  ", running, ": it hangs\n"}) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
  }
  std::abort();
}

}  // namespace

void p2pkv::test::fail(const char* file, int line, const char* what, const std::string& why) {
  ++failures;
  std::ostringstream message;  // written at once: threads fail too
  message << file << ":" << line << ": " << what << why << "\n";
  std::cerr << message.str();
}

void p2pkv::test::fail(const char* file, int line, const char* what) {
  fail(file, line, what, "");
}

int main(int argc, char** argv) {
  using p2pkv::test::failures;
  using Clock = std::chrono::steady_clock;
  const char* given = std::getenv("P2PKV_TEST_MOST_SECONDS");
  const unsigned most_seconds = given != nullptr ? std::strtoul(given, nullptr, 10) : MOST_SECONDS;
  std::signal(SIGALRM, hung);
  int n_passed = 0;
  int n_failed = 0;
  for (const auto& test : p2pkv::test::tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    failures = 0;
    running = test.name;
    alarm(most_seconds);
    const auto began = Clock::now();
    test.run();
    alarm(0);
    const std::chrono::duration<double> took = Clock::now() - began;
    const bool passed = failures == 0;
    ++(passed ? n_passed : n_failed);
    std::cout << (passed ? "ok      " : "FAILED  ") << test.name;
    if (took.count() >= WORTH_SAYING_S)
      std::cout << std::fixed << std::setprecision(1) << " (" << took.count() << " s)";
    std::cout << std::endl;
  }
  std::cout << n_passed << " passed, " << n_failed << " failed" << std::endl;
  return n_failed > 0 || n_passed == 0;
}
