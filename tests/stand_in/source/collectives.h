// Collectives of the device: gloo's, on copies of the host, each on a stream of the group's own.
//
// What a collective writes is there when somebody has waited for it, as with NCCL; until then it is
// NaN. A tensor on the host is refused.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "memory.h"
#include "operators.h"

namespace stand_in {

using Tensors = std::vector<at::Tensor>;
using Result = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

// The tensors of one collective, on the device and as gloo has them.
class Copies {
 public:
  explicit Copies(int stream, const char* name) : stream_(stream), name_(name) {}

  at::Tensor in(const at::Tensor& tensor) { return add(tensor, true, false); }
  at::Tensor out(const at::Tensor& tensor) { return add(tensor, false, true); }
  Tensors in(const Tensors& all) { return each(all, true, false); }
  Tensors out(const Tensors& all) { return each(all, false, true); }
  Tensors in_out(const Tensors& all) { return each(all, true, true); }
  std::vector<Tensors> in(const std::vector<Tensors>& all) {
    std::vector<Tensors> made;
    for (const auto& list : all) made.push_back(in(list));
    return made;
  }
  std::vector<Tensors> out(const std::vector<Tensors>& all) {
    std::vector<Tensors> made;
    for (const auto& list : all) made.push_back(out(list));
    return made;
  }

  struct Pair {
    at::Tensor device, host;
    bool written;
  };
  std::vector<Pair> pairs;
  int stream() const { return stream_; }

 private:
  at::Tensor add(const at::Tensor& tensor, bool read, bool written) {
    TORCH_CHECK(
        on_device(tensor), name_, " of a tensor on the host, of ", tensor.sizes(),
        ": this group has no backend for the device type cpu");
    start(tensor.device().index());
    touch(tensor, written, stream_, tick_, name_);
    if (tensor.numel()) memory_of(tensor);
    auto host = read ? as_host(tensor).clone(at::MemoryFormat::Contiguous)
                     : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    pairs.push_back({tensor, host, written});
    return host;
  }
  Tensors each(const Tensors& all, bool read, bool written) {
    Tensors made;
    for (const auto& tensor : all) made.push_back(add(tensor, read, written));
    return made;
  }
  // Behind what the caller's stream has been given.
  void start(int device) {
    if (started_) return;
    started_ = true;
    tell_faults();
    const int caller = current_stream(device);
    streams().run_late(caller);
    Event event;
    streams().record(event, caller);
    streams().wait_for(stream_, event);
    tick_ = streams().tick(stream_);
  }
  // A group keeps its tensors until the work is done.
  void memory_of(const at::Tensor& tensor) {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.mutex);
    const auto found = all.blocks.find(tensor.storage().data());
    if (found != all.blocks.end()) found->second->recorded.insert(stream_);
  }

  int stream_;
  const char* name_;
  bool started_ = false;
  uint64_t tick_ = 0;
};

class LateWork final : public c10d::Work {
 public:
  LateWork(Result inner, Copies copies, OpType kind)
      : Work(-1, kind), inner_(std::move(inner)), copies_(std::move(copies)) {
    streams().record(done_, copies_.stream());
    for (const auto& pair : copies_.pairs)
      if (pair.written && pair.device.numel() && pair.device.is_non_overlapping_and_dense())
        poison(pair.device.data_ptr(), pair.device.nbytes());
  }

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  void synchronize() override { wait(c10d::kUnsetTimeout); }
  int sourceRank() const override { return inner_->sourceRank(); }

  // The caller's stream waits; the host does so too, but a device's would not.
  bool wait(std::chrono::milliseconds timeout) override {
    inner_->wait(timeout);
    if (!delivered_) {
      delivered_ = true;
      for (const auto& pair : copies_.pairs)
        if (pair.written) as_host(pair.device).copy_(pair.host);
    }
    for (const auto& pair : copies_.pairs)
      streams().wait_for(current_stream(pair.device.device().index()), done_);
    return true;
  }

  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> out;
    for (const auto& pair : copies_.pairs)
      if (pair.written) out.push_back(pair.device);
    return out;
  }

 private:
  Result inner_;
  Copies copies_;
  Event done_;
  bool delivered_ = false;
};

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  Result broadcast(Tensors& all, const c10d::BroadcastOptions& options) override {
    return changed("broadcast", OpType::BROADCAST, all,
                   [&](auto& host) { return inner_->broadcast(host, options); });
  }
  Result allreduce(Tensors& all, const c10d::AllreduceOptions& options) override {
    return changed("all_reduce", OpType::ALLREDUCE, all,
                   [&](auto& host) { return inner_->allreduce(host, options); });
  }
  Result allreduce_coalesced(
      Tensors& all, const c10d::AllreduceCoalescedOptions& options) override {
    return changed("all_reduce", OpType::ALLREDUCE, all,
                   [&](auto& host) { return inner_->allreduce_coalesced(host, options); });
  }
  Result reduce(Tensors& all, const c10d::ReduceOptions& options) override {
    return changed("reduce", OpType::REDUCE, all,
                   [&](auto& host) { return inner_->reduce(host, options); });
  }
  Result allgather(
      std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return moved("all_gather", OpType::ALLGATHER, out, in,
                 [&](auto& to, auto& from) { return inner_->allgather(to, from, options); });
  }
  Result _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return moved("all_gather", OpType::_ALLGATHER_BASE, out, in,
                 [&](auto& to, auto& from) { return inner_->_allgather_base(to, from, options); });
  }
  Result allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return moved("all_gather", OpType::_ALLGATHER_BASE, out, in, [&](auto& to, auto& from) {
      return inner_->allgather_into_tensor_coalesced(to, from, options);
    });
  }
  Result gather(
      std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    return moved("gather", OpType::GATHER, out, in,
                 [&](auto& to, auto& from) { return inner_->gather(to, from, options); });
  }
  Result scatter(
      Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    return moved("scatter", OpType::SCATTER, out, in,
                 [&](auto& to, auto& from) { return inner_->scatter(to, from, options); });
  }
  Result reduce_scatter(
      Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    return moved("reduce_scatter", OpType::REDUCE_SCATTER, out, in,
                 [&](auto& to, auto& from) { return inner_->reduce_scatter(to, from, options); });
  }
  Result _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return moved("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, out, in,
                 [&](auto& to, auto& from) {
                   return inner_->_reduce_scatter_base(to, from, options);
                 });
  }
  Result reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    return moved("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, out, in,
                 [&](auto& to, auto& from) {
                   return inner_->reduce_scatter_tensor_coalesced(to, from, options);
                 });
  }
  Result alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
      std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    return moved("all_to_all", OpType::ALLTOALL_BASE, out, in, [&](auto& to, auto& from) {
      return inner_->alltoall_base(to, from, out_sizes, in_sizes, options);
    });
  }
  Result alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return moved("all_to_all", OpType::ALLTOALL, out, in,
                 [&](auto& to, auto& from) { return inner_->alltoall(to, from, options); });
  }
  Result send(Tensors& all, int to, int tag) override {
    auto copies = begin("send");
    auto host = copies.in(all);
    return late(inner_->send(host, to, tag), copies, OpType::SEND);
  }
  Result recv(Tensors& all, int from, int tag) override {
    auto copies = begin("recv");
    auto host = copies.out(all);
    return late(inner_->recv(host, from, tag), copies, OpType::RECV);
  }
  // The host waits for a barrier, as NCCL has it.
  Result barrier(const c10d::BarrierOptions& options) override {
    auto plain = options;
    plain.device = std::nullopt;
    plain.device_ids.clear();
    host_waits("barrier", "barrier");
    streams().host_waits_for_device(current_device);
    return inner_->barrier(plain);
  }

 private:
  // A collective that changes what it is given.
  template <class All, class Call>
  Result changed(const char* name, OpType kind, All& all, Call call) {
    auto copies = begin(name);
    auto host = copies.in_out(all);
    return late(call(host), copies, kind);
  }
  // One that reads some tensors and writes others.
  template <class Out, class In, class Call>
  Result moved(const char* name, OpType kind, Out& out, In& in, Call call) {
    auto copies = begin(name);
    auto from = copies.in(in);
    auto to = copies.out(out);
    return late(call(to, from), copies, kind);
  }
  Copies begin(const char* name) {
    if (stream_ < 0) stream_ = streams().make(current_device);
    return Copies(stream_, name);
  }
  static Result late(Result inner, Copies& copies, OpType kind) {
    return c10::make_intrusive<LateWork>(std::move(inner), std::move(copies), kind);
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  int stream_ = -1;
};

}  // namespace stand_in
