// What makes the host wait, counted by kind, and told to whoever listens.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace stand_in {

// Called with the kind and the operator's name, outside of all locks.
inline std::function<void(const std::string&, const std::string&)> on_wait;
inline std::mutex waits_mutex;
inline std::map<std::string, int64_t> waits;

inline void host_waits(const std::string& kind, const std::string& by) {
  {
    std::lock_guard<std::mutex> guard(waits_mutex);
    ++waits[kind];
  }
  if (on_wait) on_wait(kind, by);
}

}  // namespace stand_in
