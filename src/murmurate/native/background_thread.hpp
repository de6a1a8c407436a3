// A background thread with a queue of work, which it begins in the order of the calls.
#pragma once

#include <cstdint>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace murmurate {

// Work must not throw, and its memory must stay valid until it is done. Without a thread, as in a forked child, the
// caller does the work at once; what was queued before the fork is not done in the child.
class BackgroundThread {
 public:
  BackgroundThread() : owner_(process_id()) {
    try {
      thread_ = std::thread([this] { serve(); });
    } catch (const std::exception&) {
    }
  }

  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;

  // Whether the thread is in this process. A forked child does not have it, and must not destroy this object: the
  // mutex may stay locked for ever.
  bool in_owner_process() const { return owner_ == process_id(); }

  // Drops work that has not begun.
  ~BackgroundThread() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.clear();
      ending_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  // Queues work; returns its number, from 1.
  int64_t submit(std::function<void()> work) {
    if (!thread_.joinable() || !in_owner_process()) {
      work();
      return ++submitted_;
    }
    int64_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      number = ++submitted_;
      waiting_.emplace_back(number, std::move(work));
    }
    wake_.notify_one();
    return number;
  }

  // Returns once all work up to this number is done. Of that work, the caller itself does what has not begun.
  void wait(int64_t number) {
    if (!thread_.joinable() || !in_owner_process()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!done(number)) {
      if (!waiting_.empty() && waiting_.front().first <= number) {
        run(lock);
      } else {
        finished_.wait(lock);
      }
    }
  }

 private:
  using Work = std::pair<int64_t, std::function<void()>>;

  static int64_t process_id() {
#if defined(__unix__) || defined(__APPLE__)
    return static_cast<int64_t>(getpid());
#else
    return 0;
#endif
  }

  bool done(int64_t number) const {
    if (!waiting_.empty() && waiting_.front().first <= number) return false;
    for (int64_t running : running_)
      if (running <= number) return false;
    return true;
  }

  void run(std::unique_lock<std::mutex>& lock) {
    Work work = std::move(waiting_.front());
    waiting_.pop_front();
    running_.push_back(work.first);
    lock.unlock();
    work.second();
    lock.lock();
    for (std::size_t k = 0; k < running_.size(); ++k)
      if (running_[k] == work.first) {
        running_[k] = running_.back();
        running_.pop_back();
        break;
      }
    finished_.notify_all();
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return ending_ || !waiting_.empty(); });
      if (ending_) return;
      run(lock);
    }
  }

  const int64_t owner_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::deque<Work> waiting_;
  std::vector<int64_t> running_;
  int64_t submitted_ = 0;
  bool ending_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace murmurate
