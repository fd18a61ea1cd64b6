// Registered memory after a fork: what is under way in the parent holds nothing up in the child.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "transports/registered.h"

using namespace p2pkv;

TEST(registered_memory_in_use_at_a_fork_is_closed_in_the_child) {
  uint8_t bytes[64] = {};
  bool is_over = false;
  const auto table = std::make_shared<RegionTable>();
  const auto region = table->add({bytes, sizeof bytes, {}, true, 0, [&](uint32_t) { is_over = true; }});
  {
    const RegisteredRegion::Use use(*region);
    CHECK(static_cast<bool>(use));
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);  // it must not wait for a use that is the parent's
      region->close();
      region->close();
      const RegisteredRegion::Use after(*region);
      _exit(is_over || after ? 1 : 0);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(table->find(region->id()) == region);
  }
  region->close();
  CHECK(is_over);
  CHECK(table->find(region->id()) == nullptr);
}
