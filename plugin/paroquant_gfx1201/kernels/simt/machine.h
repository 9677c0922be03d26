// A workgroup of wave32 lanes on one CPU thread. Each lane is a fiber that runs until it has to meet others: at a barrier
// of its workgroup, or at an operation that all lanes of its wave perform together. Where not all of them come, or where
// they come to different lines, the program ends with a message and exit status FAULT.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#if !defined(__x86_64__)
#error "the SIMT harness switches fibers in x86-64 assembly"
#endif

namespace simt {

constexpr int WIDTH = 32;          // lanes of a wave
constexpr int WORDS = 16;          // most words a lane brings to, or takes from, a meeting
constexpr size_t STACK = 1 << 17;  // bytes of a fiber's stack
constexpr int FAULT = 3;

struct Dim {
  int x, y, z;
};

struct Site {
  const char* file;
  int line;
  bool operator!=(const Site& other) const { return line != other.line || strcmp(file, other.file) != 0; }
};

// As the default of a parameter: where the function is called.
inline Site here(const char* file = __builtin_FILE_NAME(), int line = __builtin_LINE()) { return {file, line}; }

struct Meeting {
  int arrived = 0;
  Site site{"", 0};
  uint64_t epoch = 0;
  uint32_t in[2][WIDTH][WORDS], out[2][WIDTH][WORDS];  // by parity of the epoch: nobody is two meetings ahead
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  const uint64_t* awaited = nullptr;  // runs again when this is no longer `seen`
  uint64_t seen = 0;
  const char* place = "";
  Site site{"", 0};
  bool done = false;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Meeting> waves;
  std::map<int, char*> lds;  // by declaration
  void* scheduler = nullptr;
  int lane = 0, threads = 0, barrier_arrived = 0;
  Site barrier_site{"", 0};
  uint64_t barrier_epoch = 0;
  Dim block{}, grid{};
  size_t dynamic_bytes = 0;
  unsigned char poison = 0;
  bool backwards = false;  // lanes and workgroups from the last to the first, and each wave as far as it can go alone
  std::function<void()> body;
};

inline Machine machine;

[[noreturn]] inline void fault(const char* format, ...) {
  va_list list;
  va_start(list, format);
  fprintf(stderr, "simt: workgroup %d,%d,%d: ", machine.block.x, machine.block.y, machine.block.z);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  va_end(list);
  fflush(stderr);
  _exit(FAULT);
}

// Saves the callee-saved registers on the running stack and goes on where `to` was saved.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

inline void wait(const uint64_t& epoch, const char* place, Site site) {
  Fiber& fiber = machine.fibers[machine.lane];
  fiber.awaited = &epoch;
  fiber.seen = epoch;
  fiber.place = place;
  fiber.site = site;
  simt_switch(&fiber.stack_pointer, machine.scheduler);
}

inline void enter() {
  machine.body();
  Fiber& fiber = machine.fibers[machine.lane];
  fiber.done = true;
  simt_switch(&fiber.stack_pointer, machine.scheduler);
}

inline void barrier(Site site) {
  Site& first = machine.barrier_site;
  if (machine.barrier_arrived == 0) first = site;
  if (first != site)
    fault("divergent barrier: lanes are at %s:%d and at %s:%d", first.file, first.line, site.file, site.line);
  if (++machine.barrier_arrived == machine.threads) {
    machine.barrier_arrived = 0;
    machine.barrier_epoch++;
  } else {
    wait(machine.barrier_epoch, "barrier", site);
  }
}

inline int lane_of_wave() { return machine.lane % WIDTH; }

// All lanes of the wave meet: `put` writes a lane's words, the last to come runs `work` over everybody's, `take` reads.
template <class Put, class Work, class Take>
inline void meet(Site site, Put put, Work work, Take take) {
  Meeting& wave = machine.waves[machine.lane / WIDTH];
  int parity = wave.epoch & 1;
  put(wave.in[parity][lane_of_wave()]);
  if (wave.arrived == 0) wave.site = site;
  if (wave.site != site)
    fault("divergent wave: lanes are at %s:%d and at %s:%d", wave.site.file, wave.site.line, site.file, site.line);
  if (++wave.arrived == WIDTH) {
    wave.arrived = 0;
    wave.epoch++;
    work(wave.in[parity], wave.out[parity]);
  } else {
    wait(wave.epoch, "wave operation", site);
  }
  take(wave.in[parity], wave.out[parity][lane_of_wave()]);
}

// LDS of the workgroup: a block of exactly this size, so that AddressSanitizer sees its ends, poisoned at the start.
inline void* shared(int declaration, size_t bytes) {
  char*& block = machine.lds[declaration];
  if (block == nullptr) {
    block = static_cast<char*>(malloc(bytes));
    memset(block, machine.poison, bytes);
  }
  return block;
}

// Runs each lane of a wave that waits for nothing, until it does; whether there was one.
inline bool advance(int wave, int& left) {
  bool progress = false;
  for (int i = 0; i < WIDTH; i++) {
    machine.lane = wave * WIDTH + (machine.backwards ? WIDTH - 1 - i : i);
    Fiber& fiber = machine.fibers[machine.lane];
    if (fiber.done || (fiber.awaited && *fiber.awaited == fiber.seen)) continue;
    simt_switch(&machine.scheduler, fiber.stack_pointer);
    progress = true;
    left -= fiber.done;
  }
  return progress;
}

inline void run_workgroup() {
  machine.waves.assign(machine.threads / WIDTH, Meeting());
  machine.barrier_arrived = 0;
  for (Fiber& fiber : machine.fibers) {
    char* stack = fiber.stack;
    if (stack == nullptr)
      stack = static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    fiber = Fiber();
    fiber.stack = stack;
    // As after a call: the stack is 8 modulo 16 when `enter` starts. Seven words below: six registers and its address.
    void** top = reinterpret_cast<void**>(stack + STACK - 64) - 1;
    *--top = reinterpret_cast<void*>(&enter);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.stack_pointer = top;
  }
  int left = machine.threads, waves = machine.threads / WIDTH;
  while (left > 0) {
    bool progress = false;
    for (int i = 0; i < waves; i++) {
      int wave = machine.backwards ? waves - 1 - i : i;
      while (advance(wave, left)) {
        progress = true;
        if (!machine.backwards) break;
      }
    }
    if (!progress) {
      for (int lane = 0; lane < machine.threads; lane++) {
        Fiber& fiber = machine.fibers[lane];
        if (!fiber.done)
          fault("deadlock: lane %d waits at the %s of %s:%d for lanes that ended or wait elsewhere", lane, fiber.place,
                fiber.site.file, fiber.site.line);
      }
    }
  }
  for (auto& [declaration, block] : machine.lds) free(block);
  machine.lds.clear();
}

inline void run(Dim grid, int threads, size_t dynamic_bytes, std::function<void()> body) {
  if (threads % WIDTH) fault("%d threads are no whole waves", threads);
  machine.grid = grid;
  machine.threads = threads;
  machine.dynamic_bytes = dynamic_bytes;
  machine.body = std::move(body);
  machine.fibers.resize(threads);
  int count = grid.x * grid.y * grid.z;
  for (int i = 0; i < count; i++) {
    int index = machine.backwards ? count - 1 - i : i;
    machine.block = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
    run_workgroup();
  }
}

}  // namespace simt
