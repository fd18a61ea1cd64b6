// GPUs that are divided into instances (MIG): a process sees one of them, as a device of its own.
#pragma once

#include <string>
#include <vector>

namespace p2pkv::cuda {

// What each device is called that is an instance of a GPU: "MIG-" and its UUID, as CUDA_VISIBLE_DEVICES has
// it, or "device 0" where the driver does not tell. Of a whole GPU it is empty.
std::vector<std::string> mig_instances();

}  // namespace p2pkv::cuda
