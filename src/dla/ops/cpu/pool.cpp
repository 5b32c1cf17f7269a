#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int64_t MOST = 1024;  // threads

struct Job {
    const std::function<void(int64_t)> *work;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    int64_t helpers;  // threads that may still join
    int64_t busy = 0;
};

struct Pool {
    std::mutex lock;
    std::condition_variable wake, done;
    std::vector<std::thread> threads;
    Job *job = nullptr;

    void loop() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            wake.wait(held, [&] { return job && job->helpers > 0; });
            Job &mine = *job;
            --mine.helpers, ++mine.busy;
            held.unlock();
            work(mine);
            held.lock();
            if (--mine.busy == 0) done.notify_all();
        }
    }
    static void work(Job &job) {
        for (int64_t i; (i = job.next++) < job.tasks;) (*job.work)(i);
    }
    void run(Job &mine) {
        {
            std::lock_guard<std::mutex> held(lock);
            try {
                while (int64_t(threads.size()) < std::min(mine.helpers, MOST)) threads.emplace_back([this] { loop(); });
            } catch (const std::system_error &) {  // the threads that there are do all the work
            }
            job = &mine;
        }
        wake.notify_all();
        work(mine);
        std::unique_lock<std::mutex> held(lock);
        job = nullptr;  // whoever has not joined by now need not
        done.wait(held, [&] { return mine.busy == 0; });
    }
};

std::atomic<Pool *> pool{nullptr};
std::mutex one_call;  // calls from several threads take turns

// A child process has none of its parent's threads: it makes its own. The parent's pool cannot be taken apart there.
void before_fork() { one_call.lock(); }
void in_parent() { one_call.unlock(); }
void in_child() {
    pool = nullptr;
    one_call.unlock();
}

}  // namespace

void run_tasks(int64_t tasks, int64_t threads, const std::function<void(int64_t)> &work) {
    const int64_t helpers = std::min(tasks, threads) - 1;
    if (helpers < 1) {
        for (int64_t i = 0; i < tasks; ++i) work(i);
        return;
    }
    std::lock_guard<std::mutex> turn(one_call);
    if (!pool) {
        static std::once_flag once;
        std::call_once(once, [] { pthread_atfork(before_fork, in_parent, in_child); });
        pool = new Pool;  // lives as long as the process: its threads may wait on it at exit
    }
    Job job;
    job.work = &work, job.tasks = tasks, job.helpers = helpers;
    pool.load()->run(job);
}
