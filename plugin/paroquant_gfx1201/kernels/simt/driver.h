// A libamdhip64 that has the five functions which the plugin's loader calls, and carries launches out on the CPU, on the
// caller's memory. Code objects are looked at, not executed: a kernel must be in the object, and is then called here.
#pragma once
#include "registry.h"

namespace simt {
struct Module {
  std::string image;
};
constexpr int INVALID_VALUE = 1, INVALID_IMAGE = 200, NOT_FOUND = 500, LAUNCH_FAILURE = 719;
constexpr int AMDGPU = 224;  // e_machine
constexpr int GFX1201 = 0x4e;
}  // namespace simt

extern "C" {

// The stream of the last launch, for a test to see.
void* simtLastStream = nullptr;

int hipModuleLoadData(simt::Module** module, const void* image) {
  const unsigned char* elf = static_cast<const unsigned char*>(image);
  if (memcmp(elf, "\177ELF", 4) != 0 || (elf[18] | elf[19] << 8) != simt::AMDGPU || elf[48] != simt::GFX1201)
    return simt::INVALID_IMAGE;
  uint64_t sections;
  memcpy(&sections, elf + 40, 8);
  size_t size = sections + (elf[58] | elf[59] << 8) * (elf[60] | elf[61] << 8);  // headers of the sections are its end
  *module = new simt::Module{std::string(reinterpret_cast<const char*>(elf), size)};
  return 0;
}

int hipModuleGetFunction(const simt::Kernel** function, const simt::Module* module, const char* name) {
  std::string descriptor = std::string(name) + ".kd";
  if (module->image.find(descriptor) == std::string::npos || !simt::kernels().count(name)) return simt::NOT_FOUND;
  *function = &simt::kernels()[name];
  return 0;
}

int hipModuleLaunchKernel(const simt::Kernel* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared_bytes, void* stream, void** parameters, void** extra) {
  if (by != 1 || bz != 1 || extra != nullptr || gx * gy * gz == 0) return simt::INVALID_VALUE;
  simtLastStream = stream;
  simt::run({static_cast<int>(gx), static_cast<int>(gy), static_cast<int>(gz)}, bx, shared_bytes,
            [&] { function->call(parameters); });
  return 0;
}

const char* hipGetErrorString(int status) { return status == simt::NOT_FOUND ? "named symbol not found" : "invalid"; }

int hipModuleUnload(simt::Module* module) {
  delete module;
  return 0;
}
}
