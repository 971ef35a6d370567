// Streams and events, and who has waited for whom.
//
// Every stream has a vector clock: how far, of each stream, its next operation is sure to come
// after. An operation ticks its own stream's entry. An event is a copy of a clock, and waiting for
// one joins it. An access to memory that an earlier one on another stream conflicts with has to
// know that one's tick (memory.h).
//
// A stream other than a device's first also is late: copies that need not wait are done only when
// somebody waits for them. So a missing wait is both an error and shows in the numbers.
#pragma once
#include <c10/core/Stream.h>
#include <c10/core/Device.h>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "waits.h"

namespace stand_in {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 8;

using Clock = std::vector<uint64_t>;  // by stream

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

struct Job {
  uint64_t tick;
  std::function<void()> run;
};

struct StreamState {
  int device;
  Clock clock;
  std::deque<Job> late;
};

struct Event {
  bool recorded = false;
  int stream = 0;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

// A device's first stream has the device's number; others follow behind.
class Streams {
 public:
  Streams() {
    for (int device = 0; device < DEVICES; ++device) all_.push_back({device, {}, {}});
  }

  int make(int device) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    all_.push_back({device, {}, {}});
    return static_cast<int>(all_.size()) - 1;
  }

  int device_of(int stream) { return all_.at(stream).device; }
  static bool is_first(int stream) { return stream < DEVICES; }

  // The tick of a new operation, which starts after all that the host has waited for.
  uint64_t tick(int stream) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    auto& clock = all_.at(stream).clock;
    join(clock, host_);
    if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1);
    return ++clock[stream];
  }

  // The tick of the last operation that the stream was given.
  uint64_t last(int stream) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    const auto& clock = all_.at(stream).clock;
    return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
  }

  // Whether the next operation on `stream` comes after `tick` of `other`.
  bool knows(int stream, int other, uint64_t tick) {
    const auto& clock = all_.at(stream).clock;
    return tick == 0 || (static_cast<size_t>(other) < clock.size() && clock[other] >= tick);
  }

  void put(int stream, uint64_t tick, std::function<void()> run) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    all_.at(stream).late.push_back({tick, std::move(run)});
    ++waiting_;
  }

  // Do what is late on `stream`, up to `tick`.
  void run_late(int stream, uint64_t tick = UINT64_MAX) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    auto& late = all_.at(stream).late;
    while (!late.empty() && late.front().tick <= tick) {
      auto job = std::move(late.front());
      late.pop_front();
      job.run();
      if (--waiting_ == 0) kept_.clear();
    }
  }

  bool any_late() const { return waiting_ > 0; }

  // Freed memory that late work may still look at.
  void keep_for_late(std::shared_ptr<void> memory) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    kept_.push_back(std::move(memory));
  }

  void record(Event& event, int stream) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    tick(stream);
    event.recorded = true;
    event.stream = stream;
    event.clock = all_.at(stream).clock;
    event.time = std::chrono::steady_clock::now();
  }

  void wait_for(int stream, const Event& event) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (!event.recorded) return;
    catch_up(event.clock);
    join(all_.at(stream).clock, event.clock);
  }

  void host_waits_for(const Event& event) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (!event.recorded) return;
    catch_up(event.clock);
    join(host_, event.clock);
  }

  void host_waits_for(int stream) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    catch_up(all_.at(stream).clock);
    run_late(stream);
    join(host_, all_.at(stream).clock);
  }

  void host_waits_for_device(int device) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    for (size_t stream = 0; stream < all_.size(); ++stream)
      if (all_[stream].device == device) host_waits_for(static_cast<int>(stream));
  }

  std::recursive_mutex mutex;

 private:
  // What a clock is sure of has been done, on every stream.
  void catch_up(const Clock& clock) {
    for (size_t stream = 0; stream < clock.size(); ++stream)
      if (clock[stream]) run_late(static_cast<int>(stream), clock[stream]);
  }

  std::deque<StreamState> all_;
  Clock host_;
  int waiting_ = 0;
  std::vector<std::shared_ptr<void>> kept_;
};

inline Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

inline thread_local int current_device = 0;
inline thread_local int current_streams[DEVICES] = {0, 1, 2, 3, 4, 5, 6, 7};

inline int current_stream(int device) { return current_streams[device]; }
inline int current_stream() { return current_streams[current_device]; }

inline c10::Stream as_c10(int stream) {
  return c10::Stream(
      c10::Stream::UNSAFE,
      c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(streams().device_of(stream))), stream);
}

}  // namespace stand_in
