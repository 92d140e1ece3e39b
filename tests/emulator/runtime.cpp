// What the compiled launchers call instead of CUDA's runtime, and what Python asks of the emulator.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>

#include "machine.h"

namespace emulator {

namespace {

struct Text {
  std::string text;
  std::unique_ptr<Kernel> kernel;
};

struct State {
  std::map<std::string, Text> texts;              // by the kernel's name
  std::map<const void*, std::string> registered;  // by the host's function
  std::string error;
};
thread_local int current_card = 0;  // ranks are threads
State& state() {
  static State* const one = new State;  // registered to before main, asked of until the end
  return *one;
}

const Kernel& kernel_named(const std::string& name) {
  const auto found = state().texts.find(name);
  if (found == state().texts.end()) fail("no PTX of " + name);
  Text& text = found->second;
  if (!text.kernel) {
    auto all = parse(text.text);
    if (all.size() != 1) fail("not one kernel in the text of " + name);
    text.kernel = std::move(all[0]);
  }
  return *text.kernel;
}
const Kernel& kernel_of(const void* function) {
  const auto found = state().registered.find(function);
  if (found == state().registered.end()) fail("a function that is no kernel");
  return kernel_named(found->second);
}

template <class F>
cudaError_t guarded(F f) {
  try {
    f();
    return cudaSuccess;
  } catch (const std::exception& error) {
    state().error = error.what();
    return cudaErrorUnknown;
  }
}

int card_of(const void* stream) { return stream ? static_cast<int>(reinterpret_cast<uintptr_t>(stream)) - 1 : current_card; }

std::unique_ptr<Grid> grid_of(const Kernel& kernel, dim3 blocks, dim3 threads, size_t shared) {
  auto grid = std::make_unique<Grid>();
  grid->kernel = &kernel;
  grid->blocks[0] = blocks.x, grid->blocks[1] = blocks.y, grid->blocks[2] = blocks.z;
  grid->threads = threads.x, grid->threads_y = threads.y, grid->threads_z = threads.z, grid->shared = static_cast<uint32_t>(shared);
  const uint64_t count = uint64_t{threads.x} * threads.y * threads.z;
  if (count == 0 || count > std::min(kernel.max_threads, kMostThreads) || (kernel.required_threads && count != kernel.required_threads))
    fail("a block of " + std::to_string(count) + " threads of " + kernel.name + ", which has at least 1 and at most " +
         std::to_string(std::min(kernel.max_threads, kMostThreads)) + (kernel.required_threads ? ", and no other number" : ""));
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) fail("a grid without blocks of " + kernel.name);
  grid->parameters.assign((kernel.parameter_bytes + 15) / 16 * 16, 0);
  return grid;
}

void launch(const void* function, dim3 blocks, dim3 threads, void** arguments, size_t shared, const void* stream, bool programmatic,
            bool cooperative) {
  const Kernel& kernel = kernel_of(function);
  auto grid = grid_of(kernel, blocks, threads, shared);
  for (size_t n = 0; n < kernel.parameters.size(); ++n)
    std::memcpy(grid->parameters.data() + kernel.parameters[n].at, arguments[n], kernel.parameters[n].bytes);
  grid->programmatic = programmatic, grid->cooperative = cooperative;
  machine.launch(card_of(stream), std::move(grid));
}

}  // namespace

}  // namespace emulator

using namespace emulator;

#define OURS extern "C" __attribute__((visibility("default")))

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  state().registered[function] = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorInvalidConfiguration; }  // <<<>>>, which nobody uses
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorInvalidConfiguration; }

cudaError_t CUDARTAPI cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return guarded([&] {
    bool programmatic = false, cooperative = false;
    for (unsigned n = 0; n < config->numAttrs; ++n) {
      programmatic = programmatic || (config->attrs[n].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
                                      config->attrs[n].val.programmaticStreamSerializationAllowed);
      cooperative = cooperative || (config->attrs[n].id == cudaLaunchAttributeCooperative && config->attrs[n].val.cooperative);
    }
    launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream, programmatic, cooperative);
  });
}
cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* out, const void* function) {
  return guarded([&] {
    *out = {};
    out->sharedSizeBytes = kernel_of(function).static_shared;
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;  // nobody knows: ptxas did not run
  });
}
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return value <= 101376 ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads, size_t shared,
                                                                             unsigned) {
  return guarded(
      [&] { *blocks = machine.blocks_that_fit((threads + 31) / 32 * 32, kernel_of(function).static_shared + static_cast<uint32_t>(shared)); });
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
cudaError_t CUDARTAPI cudaGetDevice(int* device) { return *device = current_card, cudaSuccess; }
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: return *value = machine.choices().multiprocessors, cudaSuccess;
    case cudaDevAttrMpsEnabled: return *value = 0, cudaSuccess;  // one process has the card
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return *value = kSharedOfMultiprocessor, cudaSuccess;
    default: return cudaErrorNotSupported;
  }
}
cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  return guarded([] { machine.run(); });
}
cudaError_t CUDARTAPI cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                               const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                       cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorSymbolNotFound;
}
cudaError_t CUDARTAPI cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  machine.own(reinterpret_cast<uint64_t>(*memory), bytes);
  watch.unwritten(reinterpret_cast<uint64_t>(*memory), bytes);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFree(void* memory) { return machine.disown(reinterpret_cast<uint64_t>(memory)), std::free(memory), cudaSuccess; }
cudaError_t CUDARTAPI cudaMemset(void* memory, int value, size_t bytes) {
  watch.written(reinterpret_cast<uint64_t>(memory), bytes);
  return std::memset(memory, value, bytes), cudaSuccess;
}
cudaError_t CUDARTAPI cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  return std::memcpy(handle, &memory, sizeof(memory)), cudaSuccess;
}
cudaError_t CUDARTAPI cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  return std::memcpy(memory, &handle, sizeof(*memory)), cudaSuccess;
}
cudaError_t CUDARTAPI cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaHostRegister(void* memory, size_t bytes, unsigned) {
  return machine.own(reinterpret_cast<uint64_t>(memory), bytes), cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostGetDevicePointer(void** seen, void* memory, unsigned) { return *seen = memory, cudaSuccess; }
cudaError_t CUDARTAPI cudaHostUnregister(void* memory) { return machine.disown(reinterpret_cast<uint64_t>(memory)), cudaSuccess; }
const char* CUDARTAPI cudaGetErrorName(cudaError_t) { return "emulator"; }
const char* CUDARTAPI cudaGetErrorString(cudaError_t) { return state().error.c_str(); }

}  // extern "C"

// ---- for Python: 0, or 1 and the error's text

OURS const char* emulator_error() { return state().error.c_str(); }

// Kernels of a module's text; one that is known is replaced.
OURS void emulator_ptx(const char* module) {
  const std::string text = module;
  std::vector<size_t> begins;
  for (size_t at = text.find(".entry "); at != std::string::npos; at = text.find(".entry ", at + 1)) begins.push_back(at);
  std::string shared;
  for (size_t at = text.find(".extern .shared"); at != std::string::npos; at = text.find(".extern .shared", at + 1))
    shared += text.substr(at, text.find(';', at) + 1 - at) + "\n";
  for (size_t n = 0; n < begins.size(); ++n) {
    const size_t limit = std::min(n + 1 < begins.size() ? begins[n + 1] : text.size(), text.find(".section", begins[n]));
    const size_t end = text.rfind("\n}", limit);
    const std::string name = text.substr(begins[n] + 7, text.find('(', begins[n]) - begins[n] - 7);
    const size_t lines = std::count(text.begin(), text.begin() + begins[n], '\n') - std::count(shared.begin(), shared.end(), '\n');
    state().texts[name] = {shared + std::string(lines, '\n') + text.substr(begins[n], end + 2 - begins[n]), nullptr};
  }
}
OURS int emulator_parse(const char* name) {
  return guarded([&] { kernel_named(name); }) != cudaSuccess;
}
OURS int emulator_run() {
  return guarded([] { machine.run(); }) != cudaSuccess;
}
OURS void emulator_choose(uint64_t seed, int multiprocessors, int most_instructions, int checks_memory, int is_weak, int is_watched) {
  machine.clear();
  machine.choose({seed, multiprocessors, most_instructions, checks_memory != 0, is_weak != 0, is_watched != 0});
}
OURS void emulator_limit(uint64_t most_instructions) { machine.most_instructions = most_instructions; }
OURS void emulator_card(int card) { current_card = card; }
OURS void emulator_allow(uint64_t at, uint64_t bytes) { machine.allow(at, bytes); }
OURS void emulator_unwritten(uint64_t at, uint64_t bytes) { watch.unwritten(at, bytes); }
OURS void emulator_written(uint64_t at, uint64_t bytes) { watch.written(at, bytes); }
OURS const char* emulator_reports() { return watch.reports().c_str(); }
OURS void emulator_forbid_all() { machine.forbid_all(); }
OURS void emulator_forget_launches() { machine.ran.clear(); }
OURS uint64_t emulator_ran(const char* name) { return machine.ran[name]; }  // launches that have begun
// The names of instructions that are known, a line each.
OURS const char* emulator_forms() {
  static std::string lines;
  lines.clear();
  for (const auto& [name, operands] : forms()) {
    lines += name;
    for (const std::string& one : operands) lines += ' ' + (one.empty() ? "-" : one);
    lines += '\n';
  }
  return lines.c_str();
}
// What was launched and did not run, a line each, and forgets it: kernel, blocks, threads, shared memory, is it cooperative, how many
// blocks a multiprocessor holds.
OURS const char* emulator_take() {
  static std::string lines;
  lines.clear();
  for (const Grid* grid : machine.waiting()) {
    const uint32_t threads = grid->threads * grid->threads_y * grid->threads_z, shared = grid->kernel->static_shared + grid->shared;
    lines += grid->kernel->name;
    for (const uint32_t number : {grid->blocks[0], grid->blocks[1], grid->blocks[2], threads, shared, uint32_t{grid->cooperative}})
      lines += ' ' + std::to_string(number);
    lines += ' ' + std::to_string(machine.blocks_that_fit((threads + 31) / 32 * 32, shared)) + '\n';
  }
  machine.clear();
  return lines.c_str();
}
OURS uint64_t emulator_instructions() { return machine.clock(); }
OURS int emulator_launch(const char* name, const uint32_t* sizes, const void* parameters, uint64_t bytes) {  // sizes: blocks, threads, shared
  return guarded([&] {
           const Kernel& kernel = kernel_named(name);
           auto grid = grid_of(kernel, dim3(sizes[0], sizes[1], sizes[2]), dim3(sizes[3]), sizes[4]);
           if (bytes > grid->parameters.size()) fail("more parameters than " + kernel.name + " has");
           std::memcpy(grid->parameters.data(), parameters, bytes);
           machine.launch(current_card, std::move(grid));
         }) != cudaSuccess;
}
