#include "threads.hpp"

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace murmurate {
namespace {

constexpr int64_t kMostThreads = 64;
constexpr int kSpins = 1000;  // some tens of microseconds

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class ThreadPool {
 public:
  void run(int64_t threads, int64_t parts, Part part, const void* work) {
    std::unique_lock<std::mutex> call(call_mutex_, std::try_to_lock);
    if (!call) return run_alone(parts, part, work);
    start_threads((threads < kMostThreads ? threads : kMostThreads) - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      part_ = part, work_ = work, parts_ = parts;
      wanted_ = threads - 1;
      // workers round numbers and flush denormals as the caller does, so that all threads give the same sums
      std::fegetenv(&float_environment_);
      next_.store(0, std::memory_order_relaxed);
    }
    for (int64_t k = 1; k < threads && k <= started_; ++k) begin_.notify_one();
    run_parts();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = 0;  // threads that wake up from now on come too late
    }
    // the other threads are at their last parts, most of which take less time than to sleep and be woken
    for (int spin = 0; spin < kSpins && busy_.load(std::memory_order_acquire) > 0; ++spin) pause();
    std::unique_lock<std::mutex> lock(mutex_);
    end_.wait(lock, [&] { return busy_ == 0; });
  }

  static void run_alone(int64_t parts, Part part, const void* work) {
    for (int64_t k = 0; k < parts; ++k) part(work, k);
  }

 private:
  void start_threads(int64_t workers) {
    try {
      for (; started_ < workers; ++started_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {  // use as many as the system allows
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      begin_.wait(lock, [&] { return wanted_ > 0; });
      --wanted_, ++busy_;
      std::fesetenv(&float_environment_);
      lock.unlock();
      run_parts();
      lock.lock();
      if (--busy_ == 0) end_.notify_one();
    }
  }

  void run_parts() {
    for (int64_t k; (k = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;) part_(work_, k);
  }

  std::mutex call_mutex_, mutex_;
  std::condition_variable begin_, end_;
  int64_t started_ = 0, wanted_ = 0;
  std::atomic<int64_t> busy_{0}, next_{0};
  std::fenv_t float_environment_{};
  Part part_ = nullptr;
  const void* work_ = nullptr;
  int64_t parts_ = 0;
};

// Never deleted: its threads may wait in it until the process ends.
std::atomic<ThreadPool*> pool{nullptr};

// A forked child has none of the threads, and its copies of the locks may be in any state: it starts a pool of its own.
void forget_pool() { pool.store(nullptr); }

ThreadPool* current_pool() {
  if (ThreadPool* existing = pool.load(std::memory_order_acquire)) return existing;
#if defined(__unix__) || defined(__APPLE__)
  static const bool registered = pthread_atfork(nullptr, nullptr, forget_pool) == 0;
  if (!registered) return nullptr;
#endif
  ThreadPool* fresh = new (std::nothrow) ThreadPool;
  ThreadPool* existing = nullptr;
  if (fresh && pool.compare_exchange_strong(existing, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;
  return existing;
}

}  // namespace

void in_parts(int64_t threads, int64_t parts, Part part, const void* work) {
  ThreadPool* available = threads > 1 && parts > 1 ? current_pool() : nullptr;
  if (available) return available->run(threads < parts ? threads : parts, parts, part, work);
  ThreadPool::run_alone(parts, part, work);
}

}  // namespace murmurate
