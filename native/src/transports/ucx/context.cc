#include "transports/ucx/context.h"

#include <cstdio>
#include <cstdlib>

namespace p2pkv::ucx {

std::shared_ptr<Context> Context::make(const Settings& settings, std::string* error) {
  const Api& api = Api::get();
  ucp_config_t* config = nullptr;
  ucs_status_t status = api.config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) {
    *error = std::string("cannot read UCX's settings: ") + api.status_string(status);
    return nullptr;
  }
  std::string what = "UCX finds nothing to run on";
  for (const auto& [name, value] : settings) {
    status = api.config_modify(config, name.c_str(), value.c_str());
    // Older ones lack some settings, which then matter less than running at all.
    if (status == UCS_ERR_NO_ELEM) status = UCS_OK;
    if (status == UCS_OK) continue;
    what = "cannot set UCX_" + name + "=" + value;
    break;
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  // Not RMA: with it UCX would answer any peer's software reads and writes of any address.
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "p2pkv";
  params.mt_workers_shared = 1;
  ucp_context_h context = nullptr;
  if (status == UCS_OK) status = api.init_version(Api::kApiMajor, Api::kApiMinor, &params, config, &context);
  api.config_release(config);
  if (status != UCS_OK) {
    *error = what + ": " + api.status_string(status);
    return nullptr;
  }
  return std::shared_ptr<Context>(new Context(context));
}

Context::~Context() {
  Api::get().cleanup(context_);
}

std::string Context::report() const {
  char* text = nullptr;
  size_t nbytes = 0;
  std::FILE* stream = open_memstream(&text, &nbytes);
  if (stream == nullptr) return {};
  Api::get().context_print_info(context_, stream);
  std::fclose(stream);
  const std::string report(text, nbytes);
  std::free(text);
  return report;
}

}  // namespace p2pkv::ucx
