// A team of threads that plays one program together and sleeps between programs.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

class Team {
public:
    using Program = void (*)(void *context, int thread, int threads);

    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size; i++) workers_.emplace_back([this, i] { serve(i); });
    }

    ~Team() {
        program_ = nullptr;
        started_.fetch_add(1, std::memory_order_release);
        started_.notify_all();
        for (auto &worker : workers_) worker.join();
    }

    int size() const { return size_; }

    // Every thread, the caller included, runs the program once; returns when all are through.
    void run(Program program, void *context) {
        program_ = program;
        context_ = context;
        started_.fetch_add(1, std::memory_order_release);
        started_.notify_all();
        program(context, 0, size_);
        barrier();
    }

    // Nobody passes until all have come.
    void barrier() {
        if (size_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            phase_.notify_all();
        } else {
            wait_while(phase_, phase, SPINS_INSIDE);
        }
    }

private:
    // Waiting begins with spinning, because waking a sleeping thread takes longer than most waits. Inside a program a wait beyond
    // some 20 microseconds means that the other thread lost its core, and spinning would only keep it from coming back. Between
    // programs the caller prepares the next one, which takes it some hundred microseconds while it decodes; after about twice that
    // it has nothing to do, and the workers sleep.
    static constexpr int SPINS_INSIDE = 1000, SPINS_BETWEEN = 20000;

    static void wait_while(const std::atomic<uint32_t> &value, uint32_t old, int spins) {
        for (int i = 0; i < spins; i++) {
            if (value.load(std::memory_order_acquire) != old) return;
            relax();
        }
        value.wait(old, std::memory_order_acquire);
    }

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void serve(int thread) {
        for (uint32_t seen = 0;; seen++) {
            wait_while(started_, seen, SPINS_BETWEEN);
            if (!program_) return;
            program_(context_, thread, size_);
            barrier();
        }
    }

    const int size_;
    Program program_ = nullptr;
    void *context_ = nullptr;
    std::atomic<uint32_t> started_{0}, phase_{0};
    std::atomic<int> arrived_{0};
    std::vector<std::thread> workers_;
};
