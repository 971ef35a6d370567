// The device's operators: the CPU's kernels on the same memory, after a look at where tensors are.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "memory.h"

namespace stand_in {

inline const c10::DispatchKeySet DEVICE_KEYS(c10::DispatchKey::PrivateUse1);

// One operation on the current stream of a device: behind what is late there, with a tick.
struct Operation {
  int stream;
  uint64_t tick;
  std::string name;
  Operation(int device, std::string name) : stream(current_stream(device)), name(std::move(name)) {
    tell_faults();
    streams().run_late(stream);
    tick = streams().tick(stream);
  }
  void reads(const at::Tensor& tensor) const { touch(tensor, false, stream, tick, name); }
  void writes(const at::Tensor& tensor) const { touch(tensor, true, stream, tick, name); }
};

// Memory.

inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pinned,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "memory of the device cannot be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_allocator(), DEVICE_KEYS,
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

inline at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "memory of the device cannot be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), DEVICE_KEYS,
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  const int device = storage.device().index();
  Operation operation(device, "resize");
  c10::OptionalDeviceGuard guard(storage.device());
  auto fresh = device_allocator().allocate(bytes);
  std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

inline void record_stream(at::Tensor& tensor, c10::Stream stream) {
  auto& all = memory();
  std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.blocks.find(tensor.storage().data());
  if (found != all.blocks.end()) found->second->recorded.insert(static_cast<int>(stream.id()));
}

// Views, which touch nothing.

inline at::Tensor view_of(
    const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(offset);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return out;
}

inline at::Tensor view(const at::Tensor& tensor, c10::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, tensor.numel());
  const auto stride = at::detail::computeStride(tensor.sizes(), tensor.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with the tensor's size and stride");
  return view_of(tensor, inferred, *stride, tensor.storage_offset());
}

inline at::Tensor as_strided(
    const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return view_of(tensor, size, stride, offset.value_or(tensor.storage_offset()));
}

inline at::Tensor reshape_alias(
    const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return view_of(tensor, size, stride, tensor.storage_offset());
}

inline at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return tensor;
}

inline at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto items = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(storage), 0, {items}, {1});
}

inline at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(
      tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline const at::Tensor& resize(
    const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (tensor.sizes() == size) return tensor;  // strides stay
  const auto items = c10::multiply_integers(size) + tensor.storage_offset();
  const size_t bytes = static_cast<size_t>(items) * tensor.itemsize();
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

// Copies. One that need not wait is late on a stream of its own; on a device's first stream, only
// what goes to the host is, with the values of now.

inline void copy_between(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto& there = on_device(to) ? to : from;
  const int device = there.device().index();
  const bool to_host = !on_device(to), from_host = !on_device(from);
  if (!to_host && !from_host) {
    TORCH_CHECK(
        from.device() == to.device(), "a copy from ", from.device(), " to ", to.device(),
        ": no tensor here should change its device");
  }
  Operation operation(device, "copy");
  operation.reads(from);
  operation.writes(to);
  const auto host = to_host ? to : from;
  const bool pinned = (to_host || from_host) && is_pinned(host.storage().data());
  const bool plain = from.dtype() == to.dtype() && from.is_non_overlapping_and_dense() &&
      from.strides() == to.strides();
  const int stream = operation.stream;
  if (to_host || from_host) {
    if (!non_blocking || !pinned) {
      host_waits(
          !pinned ? (to_host ? "copy to pageable memory" : "copy from pageable memory")
                  : (to_host ? "copy to the host" : "copy from the host"),
          "copy");
      streams().host_waits_for(stream);
      as_host(to).copy_(as_host(from));
      return;
    }
  }
  const bool first = Streams::is_first(stream);
  if (plain && (to_host || (!first && non_blocking))) {
    const size_t bytes = from.nbytes();
    void* target = to.data_ptr();
    if (first) {
      auto now = std::make_shared<at::Tensor>(as_host(from).clone());
      streams().put(stream, operation.tick, [=, held = to] {
        std::memcpy(target, now->const_data_ptr(), bytes);
      });
    } else {
      const void* source = from.const_data_ptr();
      streams().put(stream, operation.tick, [=, held = host] {
        std::memcpy(target, source, bytes);
      });
    }
    poison(target, bytes);  // until then
    return;
  }
  as_host(to).copy_(as_host(from));
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel()) copy_between(from, to, non_blocking);
  return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar item(const at::Tensor& tensor) {
  Operation operation(tensor.device().index(), "item");
  operation.reads(tensor);
  host_waits("item", "item");
  streams().host_waits_for(operation.stream);
  return as_host(tensor).item();
}

// Attention: the kernel that the CPU would take, so that sums are in the same order.

inline at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
    bool grouped) {
  constexpr int64_t FLASH = 1;
  auto added = mask;
  if (mask.has_value() && mask->defined() && mask->scalar_type() == at::kBool) {
    const auto nothing = at::zeros({}, query.options());
    added = at::where(*mask, nothing, nothing - std::numeric_limits<double>::infinity());
  }
  const auto choice =
      at::_fused_sdp_choice(query, key, value, added, dropout, causal, scale, grouped);
  if (choice == FLASH) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, added, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, added, dropout, causal, std::nullopt, scale, grouped));
}

// Everything else.

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()), name_(op.schema().operator_name().name), stack_(stack) {}

  void run(const c10::OperatorHandle& op) {
    const size_t count = schema_.arguments().size();
    const size_t base = stack_.size() - count;
    for (size_t i = 0; i < count; ++i) {
      indices_ = indexes() && schema_.arguments()[i].name() == "indices";
      look(stack_[base + i], writes(schema_.arguments()[i]));
    }
    if (device_ < 0) device_ = current_device;
    Operation operation(device_, name_);
    for (const auto& each : given_) each.written ? operation.writes(each.device) : operation.reads(each.device);
    if (waits()) {
      host_waits(kind_, name_);
      streams().host_waits_for(operation.stream);
    }
    for (size_t i = 0; i < count; ++i) to_host(stack_[base + i]);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    c10::DeviceGuard guard(
        c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(device_)));
    for (const auto& each : given_)
      if (each.written) resized(each);
    const size_t returned = schema_.returns().size();
    for (size_t i = stack_.size() - returned; i < stack_.size(); ++i) to_device(stack_[i], operation);
  }

 private:
  struct Given {
    at::Tensor device, host;
    bool written;
  };

  static bool writes(const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  }

  bool indexes() const {
    return name_ == "aten::index" || name_ == "aten::index_put_" || name_ == "aten::index_put" ||
        name_ == "aten::_index_put_impl_" || name_ == "aten::_unsafe_index" ||
        name_ == "aten::_unsafe_index_put";
  }

  bool takes_index() const {
    static const std::unordered_set<std::string> names{
        "aten::gather", "aten::index_select", "aten::scatter", "aten::scatter_",
        "aten::scatter_add", "aten::scatter_add_", "aten::index_add", "aten::index_add_",
        "aten::embedding"};
    return names.count(name_) > 0;
  }

  bool waits() {
    static const std::unordered_map<std::string, std::string> kinds{
        {"aten::nonzero", "nonzero"}, {"aten::masked_select", "boolean index"},
        {"aten::_unique2", "unique"}, {"aten::unique_dim", "unique"},
        {"aten::unique_consecutive", "unique"}, {"aten::equal", "equal"},
        {"aten::repeat_interleave", "repeat_interleave"}, {"aten::bincount", "bincount"}};
    const auto found = kinds.find(name_);
    if (found != kinds.end()) kind_ = found->second;
    if (name_ == "aten::repeat_interleave" && stack_.back().isInt()) kind_.clear();  // told how many
    if (kind_ == "boolean index" && fills()) kind_.clear();
    return !kind_.empty();
  }

  // One number wherever a mask is set (x[mask] = 0): on CUDA, torch fills by the mask and counts
  // nothing. Some releases do so here, too; 2.14 makes the number a tensor of this device instead.
  bool fills() const {
    if (name_ != "aten::index_put_" && name_ != "aten::_index_put_impl_") return false;
    const auto base = stack_.end() - static_cast<std::ptrdiff_t>(schema_.arguments().size());
    const at::Tensor& value = base[2].toTensor();
    if (value.dim() != 0 || base[3].toBool()) return false;
    for (const auto& each : base[1].toOptionalTensorVector())
      if (each.has_value() && each->defined() && each->scalar_type() != at::kBool) return false;
    return true;
  }

  void look(const c10::IValue& value, bool written) {
    if (value.isTensor()) look_at(value.toTensor(), written);
    else if (value.isTensorList())
      for (const at::Tensor& each : value.toTensorVector()) look_at(each, written);
    else if (value.isOptionalTensorList())
      for (const auto& each : value.toOptionalTensorVector())
        if (each.has_value()) look_at(*each, written);
  }

  void look_at(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return;
    if (indices_ && tensor.scalar_type() == at::kBool && tensor.dim() > 0) kind_ = "boolean index";
    if (!on_device(tensor)) {
      // A number on the host is an argument of the kernel, but not as an index of gather and the
      // like; host indices of a[...] are copied to the device.
      const bool number = tensor.dim() == 0 && !takes_index();
      TORCH_CHECK(
          (number || indices_) && !written,
          "Expected all tensors to be on the same device: ", name_, " met a tensor on the host of ",
          tensor.sizes());
      if (indices_ && tensor.numel()) kind_ = "copy from pageable memory";
      return;
    }
    const int device = tensor.device().index();
    TORCH_CHECK(
        device_ < 0 || device_ == device, "Expected all tensors to be on the same device: ", name_,
        " met devices ", device_, " and ", device);
    device_ = device;
    given_.push_back({tensor, as_host(tensor), written});
  }

  at::Tensor host_of(const at::Tensor& tensor) const {
    for (const auto& each : given_)
      if (each.device.is_same(tensor)) return each.host;
    return tensor;
  }

  void to_host(c10::IValue& value) const {
    if (value.isTensor()) {
      if (on_device(value.toTensor())) value = host_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& each : value.toTensorVector()) hosts.push_back(host_of(each));
      value = std::move(hosts);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const auto& each : value.toOptionalTensorVector())
        hosts.push_back(each.has_value() ? std::optional(host_of(*each)) : each);
      value = std::move(hosts);
    } else if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE) {
      value = c10::Device(c10::kCPU);
    }
  }

  void to_device(c10::IValue& value, const Operation& operation) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = device_of(value.toTensor(), operation);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> out;
      for (const at::Tensor& each : value.toTensorVector()) out.push_back(device_of(each, operation));
      value = std::move(out);
    }
  }

  // An operator gives what it writes to another size where it is not the one to write.
  void resized(const Given& given) const {
    const auto& host = given.host.storage();
    if (host.data() != given.device.storage().data()) {
      auto* storage = given.device.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(taken_over(host, device_));
      storage->set_nbytes(host.nbytes());
    }
    if (given.host.sizes() != given.device.sizes() || given.host.strides() != given.device.strides())
      given.device.unsafeGetTensorImpl()->set_sizes_and_strides(
          given.host.sizes(), given.host.strides());
  }

  // What was given, a view of it, or something new.
  at::Tensor device_of(const at::Tensor& made, const Operation& operation) {
    if (on_device(made)) return made;
    for (const auto& each : given_)
      if (each.host.is_same(made)) return each.device;
    const auto* storage = made.storage().unsafeGetStorageImpl();
    for (const auto& each : given_) {
      if (each.host.storage().unsafeGetStorageImpl() != storage) continue;
      TORCH_CHECK(made.dtype() == each.device.dtype(), name_, " views bytes as another dtype");
      return view_of(each.device, made.sizes(), made.strides(), made.storage_offset());
    }
    auto out = as_device(made, device_);
    operation.writes(out);
    return out;
  }

  const c10::FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack& stack_;
  std::string kind_;
  bool indices_ = false;  // whether the argument that is looked at is those of a[...]
  int device_ = -1;
  std::vector<Given> given_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, *stack).run(op);
}

}  // namespace stand_in
