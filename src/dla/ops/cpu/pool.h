// Threads that wait for work between calls.
#pragma once
#include <cstdint>
#include <functional>

// Calls work(0) ... work(tasks - 1), on this thread and up to `threads` - 1 others.
void run_tasks(int64_t tasks, int64_t threads, const std::function<void(int64_t)> &work);
