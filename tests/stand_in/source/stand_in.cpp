// A device that lies in the host's memory but is another one to torch: what it is in four headers,
// from streams.h upwards; here it is made known to torch and to Python.
#include "collectives.h"
#include "guard.h"

namespace stand_in {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&stand_in::fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &stand_in::empty);
  library.impl("empty_strided", &stand_in::empty_strided);
  library.impl("_copy_from", &stand_in::copy_from);
  library.impl("_copy_from_and_resize", &stand_in::copy_from_and_resize);
  library.impl("_local_scalar_dense", &stand_in::item);
  library.impl("view", &stand_in::view);
  library.impl("as_strided", &stand_in::as_strided);
  library.impl("_reshape_alias", &stand_in::reshape_alias);
  library.impl("resize_", &stand_in::resize);
  library.impl("set_.source_Storage", &stand_in::set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &stand_in::set_storage);
  library.impl("set_.source_Tensor", &stand_in::set_tensor);
  library.impl("record_stream", &stand_in::record_stream);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", &stand_in::attention);
}

namespace stand_in {

// Operators of which torch has one form for all devices beside the CPU's: here, too, the CPU's, so
// that sums are in the same order.
void take_the_cpus_kernels() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, 0);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    const bool one_form = has(c10::DispatchKey::CompositeExplicitAutograd) ||
        has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (!has(c10::DispatchKey::CPU) || !one_form || has(c10::DispatchKey::PrivateUse1)) continue;
    const auto plain = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(plain.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace stand_in

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  stand_in::take_the_cpus_kernels();
  c10::SetAllocator(stand_in::DEVICE_TYPE, &stand_in::device_allocator());
  static stand_in::Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);

  module.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& inner) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<stand_in::Collectives>(inner));
  });
  module.attr("DEVICES") = stand_in::DEVICES;
  module.def("current_device", [] { return stand_in::current_device; });
  module.def("set_device", [](int device) { stand_in::Guard().setDevice(
      stand_in::Guard::as_c10_device(device)); });
  module.def("synchronize", [](int device) { stand_in::Guard().synchronizeDevice(
      static_cast<c10::DeviceIndex>(device)); });
  module.def("waits", [] {
    std::lock_guard<std::mutex> guard(stand_in::waits_mutex);
    return std::exchange(stand_in::waits, {});
  });
  module.def("listen", [](std::optional<py::function> listener) {
    if (!listener) {
      stand_in::on_wait = nullptr;
      return;
    }
    // Never freed: a thread may still be calling it when the process ends.
    auto* held = new py::function(std::move(*listener));
    stand_in::on_wait = [held](const std::string& kind, const std::string& by) {
      py::gil_scoped_acquire acquired;
      (*held)(kind, by);
    };
  });
  module.def("allocated", [](int device) {
    std::lock_guard<std::mutex> guard(stand_in::memory().mutex);
    return stand_in::memory().usage[device].live;
  });
  module.def("peak", [](int device) {
    std::lock_guard<std::mutex> guard(stand_in::memory().mutex);
    return stand_in::memory().usage[device].peak;
  });
  module.def("reset_peak", [](int device) {
    std::lock_guard<std::mutex> guard(stand_in::memory().mutex);
    auto& usage = stand_in::memory().usage[device];
    usage.peak = usage.live;
  });
}
