// A CPU allocator for torch that knows how many bytes are alive, exactly: of every thread, kernel and collective.
//
// The size of a block lies in front of it, so that its release needs no look-up. Blocks from before it was installed go
// back to the allocator they came from and are not counted.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr size_t kAlignment = 64;  // what torch's kernels expect, and the room for the size
std::atomic<int64_t> live{0};
std::atomic<int64_t> peak{0};

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  char* block = static_cast<char*>(data) - kAlignment;
  int64_t size;
  std::memcpy(&size, block, sizeof(size));
  live.fetch_sub(size, std::memory_order_relaxed);
  std::free(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (size == 0) {
      return {nullptr, nullptr, &release, device};
    }
    void* block = nullptr;
    if (posix_memalign(&block, kAlignment, size + kAlignment) != 0) {
      throw std::bad_alloc();
    }
    const int64_t counted = static_cast<int64_t>(size);
    std::memcpy(block, &counted, sizeof(counted));
    const int64_t now = live.fetch_add(counted, std::memory_order_relaxed) + counted;
    int64_t highest = peak.load(std::memory_order_relaxed);
    while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
    }
    void* data = static_cast<char*>(block) + kAlignment;
    return {data, data, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
};

CountingAllocator allocator;

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", [] { c10::SetCPUAllocator(&allocator, /*priority=*/255); });
  module.def("live_bytes", [] { return live.load(); });
  module.def("restart_peak", [] { peak.store(live.load()); });
  module.def("peak_bytes", [] { return peak.load(); });
}
