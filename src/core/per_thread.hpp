// SPDX-License-Identifier: Apache-2.0
// A value of each thread's own, without thread_local: that takes memory behind our back, for the thread's copy where
// the library was opened by dlopen and for its destructor, and ends the process where there is none.
// Included by api, core/openmp.cpp and sm90/tensor_map.cpp. See docs/cpu_kernels.md, "Memory that runs out, forks".
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <new>

namespace tessera {

// A static one is constinit. Values are destroyed when their threads end.
template <class T>
class PerThread {
 public:
  // Made when the thread first asks. Null: there is no memory for it, or there are too many such values in the process.
  T* get() noexcept {
    if (!make_key()) return nullptr;
    const pthread_key_t key = key_plus_1.load(std::memory_order_acquire) - 1;
    if (void* made = pthread_getspecific(key)) return static_cast<T*>(made);
    std::unique_ptr<T> fresh(new (std::nothrow) T());
    if (!fresh || pthread_setspecific(key, fresh.get()) != 0) return nullptr;
    return fresh.release();
  }

 private:
  bool make_key() noexcept {
    if (key_plus_1.load(std::memory_order_acquire) != 0) return true;
    pthread_key_t key;
    if (pthread_key_create(&key, [](void* value) { delete static_cast<T*>(value); }) != 0) return false;
    pthread_key_t none = 0;
    if (!key_plus_1.compare_exchange_strong(none, key + 1, std::memory_order_acq_rel)) pthread_key_delete(key);
    return true;
  }

  std::atomic<pthread_key_t> key_plus_1{0};
};

}  // namespace tessera
