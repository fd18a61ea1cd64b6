// Runs the native tests whose name contains the argument, or all; exits with 1 if any failed or none was
// found. A test that hangs ends its process, which says its name and where its main thread stood.
// P2PKV_TEST_JOBS processes share the tests, one by default: most tests wait for half of their time.
// P2PKV_TEST_SKIP leaves out those whose names begin with any of these, which commas separate.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>

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

namespace {

// What the processes share.
struct Tally {
  std::atomic<size_t> next{0};
  std::atomic<int> passed{0};
  std::atomic<int> failed{0};
};

unsigned long number_from(const char* variable, unsigned long otherwise) {
  const char* given = std::getenv(variable);
  return given != nullptr ? std::strtoul(given, nullptr, 10) : otherwise;
}

void run(const p2pkv::test::Test& test, Tally& tally) {
  using p2pkv::test::failures;
  using Clock = std::chrono::steady_clock;
  failures = 0;
  running = test.name;
  alarm(number_from("P2PKV_TEST_MOST_SECONDS", MOST_SECONDS));
  const auto began = Clock::now();
  test.run();
  alarm(0);
  const std::chrono::duration<double> took = Clock::now() - began;
  const bool passed = failures == 0;
  ++(passed ? tally.passed : tally.failed);
  std::ostringstream line;  // written at once: others write too
  line << (passed ? "ok      " : "FAILED  ") << test.name;
  if (took.count() >= WORTH_SAYING_S)
    line << std::fixed << std::setprecision(1) << " (" << took.count() << " s)";
  line << "\n";
  std::cout << line.str() << std::flush;
}

bool is_skipped(const std::string& name) {
  const char* skipped = std::getenv("P2PKV_TEST_SKIP");
  std::istringstream beginnings(skipped != nullptr ? skipped : "");
  for (std::string beginning; std::getline(beginnings, beginning, ',');) {
    if (name.compare(0, beginning.size(), beginning) == 0) return true;
  }
  return false;
}

void run_what_is_left(const char* filter, Tally& tally) {
  const auto& tests = p2pkv::test::tests();
  for (size_t i = tally.next++; i < tests.size(); i = tally.next++) {
    const bool is_chosen = filter == nullptr || std::strstr(tests[i].name, filter) != nullptr;
    if (is_chosen && !is_skipped(tests[i].name)) run(tests[i], tally);
  }
}

// Says how a process of tests ended that did not end well: not all that kills one says so itself.
void say_end(pid_t process, int status) {
  std::ostringstream line;
  line << "FAILED  process " << process << ": ";
  if (WIFSIGNALED(status)) {
    line << "signal " << WTERMSIG(status) << " (" << strsignal(WTERMSIG(status)) << ")";
  } else {
    line << "exit status " << WEXITSTATUS(status);
  }
  line << "\n";
  std::cout << line.str() << std::flush;
}

// Forks before anything has made a thread. Whether all processes came to their ends.
bool run_in_processes(unsigned long n_processes, const char* filter, Tally& tally) {
  for (unsigned long i = 0; i < n_processes; ++i) {
    const pid_t child = fork();
    if (child < 0) return false;
    if (child == 0) {
      run_what_is_left(filter, tally);
      std::exit(0);  // what looks for leaks looks now
    }
  }
  bool all_ended = true;
  int status = 0;
  for (pid_t ended = wait(&status); ended > 0; ended = wait(&status)) {
    if (status == 0) continue;
    all_ended = false;
    say_end(ended, status);
  }
  return all_ended;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGALRM, hung);
  void* shared = mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  Tally& tally = *new (shared) Tally;
  const char* filter = argc > 1 ? argv[1] : nullptr;
  const unsigned long n_processes = std::max(1UL, number_from("P2PKV_TEST_JOBS", 1));
  bool all_ended = true;
  if (n_processes == 1) {
    run_what_is_left(filter, tally);
  } else {
    all_ended = run_in_processes(n_processes, filter, tally);
  }
  std::cout << tally.passed << " passed, " << tally.failed << " failed"
            << (all_ended ? "" : ", and a process came to no good end") << std::endl;
  return !all_ended || tally.failed > 0 || tally.passed == 0;
}
