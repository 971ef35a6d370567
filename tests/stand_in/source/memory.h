// The device's memory, the host's pinned memory, and who uses what of it on which stream.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "streams.h"

namespace stand_in {

struct Access {
  size_t begin, end;  // bytes
  int stream;
  uint64_t tick;
  bool writes;
  std::string by;
};

struct Block {
  void* data;
  size_t bytes;
  int device;
  int stream;  // on which it was allocated: freed, it may be used there at once
  std::shared_ptr<void> memory;  // what the bytes lie in
  std::vector<Access> accesses;
  std::unordered_set<int> recorded;  // streams that its freeing waits for
};

struct Usage {
  int64_t live = 0, peak = 0;
};

// Of memory that was freed: an access on another stream that may still go on.
struct Pending {
  int stream;
  uint64_t tick;
  std::string told;
};

struct Memory {
  std::mutex mutex;
  std::map<int, std::vector<Pending>> freed;  // by the stream that may use it again
  std::unordered_map<const void*, Block*> blocks;
  Usage usage[DEVICES];
  std::map<const char*, size_t> pinned;  // begin, bytes
  std::string fault;  // of an allocation, which cannot raise: told by the next operation
};

inline Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

inline const char* verb(bool writes) { return writes ? "writes" : "reads"; }

// NaN in every floating dtype.
inline void poison(void* data, size_t bytes) { std::memset(data, 0xFF, bytes); }

inline void release(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& all = memory();
  auto& order = streams();
  std::lock_guard<std::recursive_mutex> order_guard(order.mutex);
  {
    std::lock_guard<std::mutex> guard(all.mutex);
    all.usage[block->device].live -= static_cast<int64_t>(block->bytes);
    all.blocks.erase(block->data);
    bool in_use = !block->recorded.empty();
    for (const auto& access : block->accesses) {
      if (access.stream == block->stream || block->recorded.count(access.stream)) continue;
      // The memory is free when the streams it was recorded on have come to here.
      bool known = order.knows(block->stream, access.stream, access.tick);
      for (const int each : block->recorded)
        known = known || order.knows(each, access.stream, access.tick);
      if (known) continue;
      all.freed[block->stream].push_back({access.stream, access.tick, c10::str(
          "memory of ", block->bytes, " bytes was freed while ", access.by, " on stream ",
          access.stream, " ", verb(access.writes), " it, and stream ", block->stream, ", on which it was allocated, is",
          " given new memory without having waited for that: it may be the same")});
    }
    // Late copies may still come: what they find is nobody's.
    if (order.any_late() && !in_use) poison(block->data, block->bytes);
  }
  if (order.any_late()) order.keep_for_late(std::move(block->memory));
  delete block;
}

// `memory` holds `data`, which becomes the device's.
inline c10::DataPtr adopt(void* data, size_t bytes, std::shared_ptr<void> held, int device) {
  const int stream = current_stream(device);
  auto* block = new Block{data, bytes, device, stream, std::move(held), {}, {}};
  auto& all = memory();
  std::lock_guard<std::recursive_mutex> order_guard(streams().mutex);
  // What the stream was given before may still use the memory, which was another tensor's.
  block->accesses.push_back({0, bytes, stream, streams().last(stream), true, "its allocation"});
  std::lock_guard<std::mutex> guard(all.mutex);
  for (const auto& each : all.freed[stream])
    if (!streams().knows(stream, each.stream, each.tick)) all.fault = each.told;
  all.freed[stream].clear();
  auto& usage = all.usage[device];
  usage.live += static_cast<int64_t>(bytes);
  usage.peak = std::max(usage.peak, usage.live);
  if (bytes) all.blocks[data] = block;
  return {data, block, &release, c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(device))};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto host = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(bytes));
    void* data = host->get();
    return adopt(data, bytes, std::move(host), current_device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

inline DeviceAllocator& device_allocator() {
  static auto* made = new DeviceAllocator;
  return *made;
}

inline bool is_pinned(const void* data) {
  auto& all = memory();
  std::lock_guard<std::mutex> guard(all.mutex);
  auto next = all.pinned.upper_bound(static_cast<const char*>(data));
  if (next == all.pinned.begin()) return false;
  --next;
  return static_cast<const char*>(data) < next->first + std::max<size_t>(next->second, 1);
}

inline void unpin(void* data) {
  {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.mutex);
    all.pinned.erase(static_cast<const char*>(data));
  }
  c10::GetCPUAllocator()->raw_deallocate(data);
}

// A late copy holds the tensor on the host, as torch's cache of pinned memory does.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1));
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.mutex);
    all.pinned[static_cast<const char*>(data)] = bytes;
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

inline PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DEVICE_TYPE;
}

// Bytes of its storage that a tensor may touch.
inline std::pair<size_t, size_t> span(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  auto item = static_cast<int64_t>(tensor.itemsize());
  auto first = static_cast<int64_t>(tensor.storage_offset()) * item;
  return {first, first + (last + 1) * item};
}

// Note an access on `stream`, and raise when nothing orders it behind one that it conflicts with.
inline void touch(
    const at::Tensor& tensor, bool writes, int stream, uint64_t tick, const std::string& by) {
  if (!on_device(tensor)) return;
  const auto [begin, end] = span(tensor);
  if (begin == end) return;
  auto& all = memory();
  auto& order = streams();
  std::lock_guard<std::recursive_mutex> order_guard(order.mutex);
  std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.blocks.find(tensor.storage().data());
  if (found == all.blocks.end()) return;
  auto& accesses = found->second->accesses;
  std::string told;
  auto keep = accesses.begin();
  for (auto& each : accesses) {
    const bool apart = each.end <= begin || end <= each.begin;
    if (each.stream != stream && !apart && (writes || each.writes) &&
        !order.knows(stream, each.stream, each.tick)) {
      told = c10::str(
          by, " ", verb(writes), " on stream ", stream, " what ", each.by, " ", verb(each.writes),
          " on stream ", each.stream, ", a tensor of ", tensor.sizes(), ", and has not waited for it");
    }
    const bool covered = each.stream == stream && begin <= each.begin && each.end <= end &&
        (writes || !each.writes);
    if (!covered) *keep++ = each;
  }
  accesses.erase(keep, accesses.end());
  accesses.push_back({begin, end, stream, tick, writes, by});
  TORCH_CHECK(told.empty(), told);
}

inline void tell_faults() {
  std::string told;
  {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.mutex);
    std::swap(told, all.fault);
  }
  TORCH_CHECK(told.empty(), told);
}

// The same memory as a tensor on the host, while the device's tensor is there.
inline at::Tensor as_host(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  const auto& storage = tensor.storage();
  c10::Storage host(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
      /*resizable=*/true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return out;
}

// Gives the memory of what an operator made on the host to the device, without a copy.
inline c10::DataPtr taken_over(const c10::Storage& made, int device) {
  return adopt(made.mutable_data(), made.nbytes(), std::make_shared<c10::Storage>(made), device);
}

inline at::Tensor as_device(const at::Tensor& made, int device) {
  const auto& storage = made.storage();
  c10::Storage owner(
      c10::Storage::use_byte_size_t(), storage.nbytes(), taken_over(storage, device),
      &device_allocator(), /*resizable=*/true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(owner), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), made.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(made.storage_offset());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
  return out;
}

}  // namespace stand_in
