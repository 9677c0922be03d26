// The command line of an emulated program:
//
//     program KERNEL GX GY GZ THREADS DYNAMIC_LDS_BYTES ARGUMENT...
//
// int:VALUE is a number, in:FILE a buffer that the kernel reads, io:FILE one that it also writes, out:FILE:BYTES one that
// it only writes. Every launch runs twice: waves in step from the first lane on, then each wave as far as it can go alone
// from the last lane on, with another poison in outputs and LDS, and reciprocal estimates off to the other side. A byte of
// an output that keeps both poisons was never written; any other difference is a race or a read of uninitialised memory,
// which ends the program with status UNSTABLE. The outputs go to their files, and a byte 1 for each byte not written to
// FILE.unwritten.
#pragma once
#include "registry.h"

namespace simt {

constexpr int UNSTABLE = 4, USAGE = 2;
constexpr unsigned char POISON[2] = {0xa5, 0x5a};

struct Buffer {
  std::string kind, path;
  std::string bytes;     // as they were
  std::string after[2];  // and after each run
};

inline std::string read_file(const std::string& path) {
  FILE* file = fopen(path.c_str(), "rb");
  if (!file) fault("cannot read %s", path.c_str());
  fseek(file, 0, SEEK_END);
  std::string bytes(ftell(file), 0);
  rewind(file);
  if (fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) fault("cannot read %s", path.c_str());
  fclose(file);
  return bytes;
}

inline void write_file(const std::string& path, const std::string& bytes) {
  FILE* file = fopen(path.c_str(), "wb");
  if (!file || fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() || fclose(file))
    fault("cannot write %s", path.c_str());
}

// Compares the two runs of an output, and writes it.
inline bool settle(const Buffer& buffer, int number) {
  std::string unwritten(buffer.bytes.size(), 0);
  bool fresh = buffer.kind == "out";
  for (size_t i = 0; i < unwritten.size(); i++) {
    unsigned char first = buffer.after[0][i], second = buffer.after[1][i];
    unwritten[i] = fresh && first == POISON[0] && second == POISON[1];
    if (first == second || unwritten[i]) continue;
    fprintf(stderr, "simt: byte %zu of argument %d is 0x%02x in one run and 0x%02x in the other: a race, or a read of "
            "uninitialised memory\n", i, number, first, second);
    return false;
  }
  write_file(buffer.path, buffer.after[0]);
  write_file(buffer.path + ".unwritten", unwritten);
  return true;
}

inline int main(int count, char** words) {
  if (count < 7 || !kernels().count(words[1])) {
    fprintf(stderr, "simt: no kernel %s\n", count > 1 ? words[1] : "named");
    return USAGE;
  }
  const Kernel& kernel = kernels()[words[1]];
  Dim grid{atoi(words[2]), atoi(words[3]), atoi(words[4])};
  std::vector<Buffer> buffers;
  std::vector<uint64_t> slots;
  for (int i = 7; i < count; i++) {
    std::string word = words[i], kind = word.substr(0, word.find(':')), rest = word.substr(word.find(':') + 1);
    Buffer buffer{kind, rest, "", {}};
    if (kind == "out") {
      size_t colon = rest.rfind(':');
      buffer.path = rest.substr(0, colon);
      buffer.bytes.resize(std::stoul(rest.substr(colon + 1)));
    } else if (kind != "int") {
      buffer.bytes = read_file(rest);
    }
    slots.push_back(kind == "int" ? static_cast<uint64_t>(std::stoll(rest)) : 0);
    buffers.push_back(buffer);
  }
  if (slots.size() != kernel.arguments) fault("%s takes %zu arguments, not %zu", words[1], kernel.arguments, slots.size());
  for (int round = 0; round < 2; round++) {
    machine.poison = POISON[round];
    machine.backwards = round == 1;
    for (size_t i = 0; i < buffers.size(); i++) {
      Buffer& buffer = buffers[i];
      if (buffer.kind == "int") continue;
      // Exactly as large as the buffer, so that AddressSanitizer sees its ends.
      char* memory = static_cast<char*>(malloc(buffer.bytes.size()));
      if (buffer.kind == "out")
        memset(memory, machine.poison, buffer.bytes.size());
      else
        memcpy(memory, buffer.bytes.data(), buffer.bytes.size());
      slots[i] = reinterpret_cast<uint64_t>(memory);
    }
    std::vector<void*> parameters;
    for (uint64_t& slot : slots) parameters.push_back(&slot);
    run(grid, atoi(words[5]), atoi(words[6]), [&] { kernel.call(parameters.data()); });
    for (size_t i = 0; i < buffers.size(); i++) {
      if (buffers[i].kind == "int") continue;
      char* memory = reinterpret_cast<char*>(slots[i]);
      buffers[i].after[round].assign(memory, buffers[i].bytes.size());
      if (buffers[i].kind == "in" && buffers[i].after[round] != buffers[i].bytes) fault("argument %zu is read only", i);
      free(memory);
    }
  }
  for (size_t i = 0; i < buffers.size(); i++)
    if (buffers[i].kind == "out" || buffers[i].kind == "io")
      if (!settle(buffers[i], i)) return UNSTABLE;
  return 0;
}

}  // namespace simt

int main(int count, char** words) { return simt::main(count, words); }
