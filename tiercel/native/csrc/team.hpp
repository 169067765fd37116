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
            wait_while(phase_, phase);
        }
    }

private:
    // Spinning pays for the microseconds between two stages; a longer wait means that the other thread lost its core,
    // and spinning would only keep it from coming back.
    static constexpr int SPINS = 1000;

    static void wait_while(const std::atomic<uint32_t> &value, uint32_t old) {
        for (int i = 0; i < SPINS; i++) {
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
            wait_while(started_, seen);
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
