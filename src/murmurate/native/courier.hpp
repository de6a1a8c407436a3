// A queue of work for one background thread, which does it in the order of the calls.
#pragma once

#include <cstdint>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace murmurate {

// Work must not throw, and its memory must stay valid until it is done. Without a thread, as in a forked child, the
// caller does the work at once.
class Courier {
 public:
  Courier() : home_(process()) {
    try {
      thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error&) {
    }
  }

  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Whether its thread is in this process. A forked child has no such thread, and must not destroy this object: its
  // mutex may be locked for ever.
  bool here() const { return home_ == process(); }

  // Work that has not begun is dropped.
  ~Courier() {
    {
      std::lock_guard<std::mutex> look(look_);
      waiting_.clear();
      ends_ = true;
    }
    more_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  // The number of this work, from 1.
  int64_t ask(std::function<void()> work) {
    if (!thread_.joinable() || !here()) {
      work();
      return ++asked_;
    }
    int64_t number;
    {
      std::lock_guard<std::mutex> look(look_);
      number = ++asked_;
      waiting_.emplace_back(number, std::move(work));
    }
    more_.notify_one();
    return number;
  }

  // Returns once all work up to this number is done. The caller itself does work that has not begun.
  void wait(int64_t number) {
    if (!thread_.joinable() || !here()) return;
    std::unique_lock<std::mutex> look(look_);
    while (!done(number)) {
      if (!waiting_.empty() && waiting_.front().first <= number) {
        run(look);
      } else {
        ended_.wait(look);
      }
    }
  }

 private:
  using Work = std::pair<int64_t, std::function<void()>>;

  static int64_t process() {
#if defined(__unix__) || defined(__APPLE__)
    return static_cast<int64_t>(getpid());
#else
    return 0;
#endif
  }

  bool done(int64_t number) const {
    if (!waiting_.empty() && waiting_.front().first <= number) return false;
    for (int64_t one : running_)
      if (one <= number) return false;
    return true;
  }

  void run(std::unique_lock<std::mutex>& look) {
    Work work = std::move(waiting_.front());
    waiting_.pop_front();
    running_.push_back(work.first);
    look.unlock();
    work.second();
    look.lock();
    for (std::size_t k = 0; k < running_.size(); ++k)
      if (running_[k] == work.first) {
        running_[k] = running_.back();
        running_.pop_back();
        break;
      }
    ended_.notify_all();
  }

  void serve() {
    std::unique_lock<std::mutex> look(look_);
    for (;;) {
      more_.wait(look, [&] { return ends_ || !waiting_.empty(); });
      if (ends_) return;
      run(look);
    }
  }

  const int64_t home_;
  std::mutex look_;
  std::condition_variable more_, ended_;
  std::deque<Work> waiting_;
  std::vector<int64_t> running_;
  int64_t asked_ = 0;
  bool ends_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace murmurate
