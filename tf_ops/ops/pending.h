// The end of an asynchronous op. The engine ends it when the data is there; TensorFlow ends it when the step is
// cancelled (another op of the step has failed); a signal ends it (interrupt.h). Whoever comes first does it, once; the
// others find it ended. After the end the context is gone, so it is only touched in here, under the lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "engine/interrupt.h"
#include "ops/status.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace hvd_ext {

class Pending : public std::enable_shared_from_this<Pending> {
 public:
  using Context = tensorflow::OpKernelContext;
  using Callback = tensorflow::AsyncOpKernel::DoneCallback;

  // Where the step is cancelled already, the op has ended when this returns.
  static std::shared_ptr<Pending> Begin(Context* context, Callback done) {
    std::shared_ptr<Pending> pending(new Pending(context, std::move(done)));
    if (!pending->eager_) {
      std::lock_guard<std::mutex> lock(pending->mutex_);
      pending->interrupt_ = Interrupts::Add([pending] { pending->Interrupt(); });
    }
    tensorflow::CancellationManager* manager = context->cancellation_manager();
    if (manager == nullptr) return pending;
    auto cancel = [pending] {
      pending->End(
          [](Context* c) { c->SetStatus(absl::CancelledError("hvd_ext: the step was cancelled while it waited")); });
    };
    pending->token_ = manager->get_cancellation_token();
    if (!manager->RegisterCallback(pending->token_, cancel)) cancel();
    return pending;
  }

  // Sets some of the outputs in `set`; nothing where the op has ended. Any thread.
  void While(const std::function<void(Context*)>& set) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (context_ != nullptr) set(context_);
  }

  // Sets outputs or the status in `finish`, then ends the op; nothing where it has ended. Any thread.
  void End(const std::function<void(Context*)>& finish) {
    Callback done;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (context_ == nullptr) return;
      finish(context_);
      Interrupts::Remove(interrupt_);
      // Does not wait for a cancellation that is under way: it would find the op ended.
      if (tensorflow::CancellationManager* manager = context_->cancellation_manager()) {
        manager->TryDeregisterCallback(token_);
      }
      context_ = nullptr;
      done = std::move(done_);
    }
    ended_.notify_one();
    done();
  }

  // Ends the op with a status.
  void End(const Status& status) {
    End([&](Context* c) {
      if (!status.ok()) c->SetStatus(ToTensorFlow(status));
    });
  }

  // The last call of ComputeAsync. TensorFlow waits for the end of an eager op on the caller's thread; this waits
  // before it does, because it can end the wait when a signal handler raises an exception.
  void WaitIfEager() {
    const auto look = std::chrono::duration<double>(kLookForSignals_s);
    std::unique_lock<std::mutex> lock(mutex_);
    while (eager_ && !ended_.wait_for(lock, look, [this] { return context_ == nullptr; })) {
      lock.unlock();
      if (Interrupts::HandlerRaises()) Interrupt();
      lock.lock();
    }
  }

 private:
  Pending(Context* context, Callback done) : context_(context), done_(std::move(done)), eager_(IsEager(*context)) {}

  // TensorFlow runs an eager op by itself, without the arguments and results of a function, or as a function of one op
  // on an executor that runs one op after the other on the caller's thread.
  static bool IsEager(const Context& context) {
    return context.call_frame() == nullptr || context.executor_type() == "SINGLE_THREADED_EXECUTOR";
  }

  void Interrupt() {
    End([](Context* c) { c->SetStatus(absl::CancelledError(Interrupted(c->op_kernel().type_string()))); });
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  Context* context_;  // null: ended
  Callback done_;
  const bool eager_;
  int64_t interrupt_ = 0;  // of Interrupts; 0: none
  tensorflow::CancellationToken token_ = tensorflow::CancellationManager::kInvalidToken;
};

}  // namespace hvd_ext
