#include "threads.hpp"

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace murmurate {
namespace {

constexpr int64_t kMost = 64;
constexpr int kSpins = 1000;  // some tens of microseconds

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class Crew {
 public:
  void run(int64_t threads, int64_t parts, Part part, const void* work) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) return alone(parts, part, work);
    hire((threads < kMost ? threads : kMost) - 1);
    {
      std::lock_guard<std::mutex> look(look_);
      part_ = part, work_ = work, parts_ = parts;
      wanted_ = threads - 1;
      // workers round, and flush denormals, as the caller does: their sums are its sums
      std::fegetenv(&arithmetic_);
      next_.store(0, std::memory_order_relaxed);
    }
    for (int64_t k = 1; k < threads && k <= hired_; ++k) begin_.notify_one();
    take();
    {
      std::lock_guard<std::mutex> look(look_);
      wanted_ = 0;  // who wakes up from now on comes too late
    }
    // the others are at their last parts: to sleep and be woken takes longer than most of them
    for (int spin = 0; spin < kSpins && busy_.load(std::memory_order_acquire) > 0; ++spin) pause();
    std::unique_lock<std::mutex> look(look_);
    end_.wait(look, [&] { return busy_ == 0; });
  }

  static void alone(int64_t parts, Part part, const void* work) {
    for (int64_t k = 0; k < parts; ++k) part(work, k);
  }

 private:
  void hire(int64_t workers) {
    try {
      for (; hired_ < workers; ++hired_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // as many as the system gives
    }
  }

  void serve() {
    std::unique_lock<std::mutex> look(look_);
    for (;;) {
      begin_.wait(look, [&] { return wanted_ > 0; });
      --wanted_, ++busy_;
      std::fesetenv(&arithmetic_);
      look.unlock();
      take();
      look.lock();
      if (--busy_ == 0) end_.notify_one();
    }
  }

  void take() {
    for (int64_t k; (k = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;) part_(work_, k);
  }

  std::mutex turn_, look_;
  std::condition_variable begin_, end_;
  int64_t hired_ = 0, wanted_ = 0;
  std::atomic<int64_t> busy_{0}, next_{0};
  std::fenv_t arithmetic_{};
  Part part_ = nullptr;
  const void* work_ = nullptr;
  int64_t parts_ = 0;
};

// Never deleted: its threads may wait in it until the process ends.
std::atomic<Crew*> crew{nullptr};

// A forked child has none of the threads, and locks in any state: it starts threads of its own.
void forget_crew() { crew.store(nullptr); }

Crew* present_crew() {
  if (Crew* found = crew.load(std::memory_order_acquire)) return found;
#if defined(__unix__) || defined(__APPLE__)
  static const bool told = pthread_atfork(nullptr, nullptr, forget_crew) == 0;
  if (!told) return nullptr;
#endif
  Crew* fresh = new (std::nothrow) Crew;
  Crew* other = nullptr;
  if (fresh && crew.compare_exchange_strong(other, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;
  return other;
}

}  // namespace

void in_parts(int64_t threads, int64_t parts, Part part, const void* work) {
  Crew* found = threads > 1 && parts > 1 ? present_crew() : nullptr;
  if (found) return found->run(threads < parts ? threads : parts, parts, part, work);
  Crew::alone(parts, part, work);
}

}  // namespace murmurate
