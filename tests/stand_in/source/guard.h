// What torch asks of a device: which one is current, its streams and events, its generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "operators.h"

namespace stand_in {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device as_c10_device(int device) {
    return {DEVICE_TYPE, static_cast<c10::DeviceIndex>(device)};
  }
  static int number(c10::Device device) {
    return device.has_index() ? device.index() : current_device;
  }

  c10::DeviceType type() const override { return DEVICE_TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return as_c10_device(current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(number(device) < DEVICES, "there are ", DEVICES, " devices, not ", device);
    current_device = number(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = number(device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_c10(current_stream(number(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_c10(number(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_c10(streams().make(number(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    const auto before = as_c10(current_stream(device));
    current_streams[device] = static_cast<int>(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    streams().host_waits_for(static_cast<int>(stream.id()));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("synchronize", "stream");
    streams().host_waits_for(static_cast<int>(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits("synchronize", "device");
    streams().host_waits_for_device(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.mutex);
    const auto found = all.blocks.find(data.get());
    if (found != all.blocks.end()) found->second->recorded.insert(static_cast<int>(stream.id()));
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    streams().record(*static_cast<Event*>(*event), static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) streams().wait_for(static_cast<int>(stream.id()), *static_cast<Event*>(event));
  }
  // To ask is to find it done: nothing else makes what is late go on.
  bool queryEvent(void* event) const override {
    if (event) streams().host_waits_for(*static_cast<Event*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    host_waits("synchronize", "event");
    streams().host_waits_for(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto took = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(took).count();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    if (device >= 0) current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  // The host's: a run draws the same numbers as on the host.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Device getDeviceFromPtr(void* data) const override {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.mutex);
    const auto found = all.blocks.find(data);
    TORCH_CHECK(found != all.blocks.end(), "no memory of the device");
    return Guard::as_c10_device(found->second->device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace stand_in
