#include "base/copy.h"

#include "base/copy_choice.h"

namespace p2pkv {

void copy_bytes(void* to, const void* from, size_t nbytes) {
  kernel_for(Copying::kPlain, nbytes).copy(to, from, nbytes);
}

}  // namespace p2pkv
