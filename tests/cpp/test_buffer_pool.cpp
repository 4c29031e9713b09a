#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "runtime/buffer_pool.h"

using pymoe::runtime::BufferPool;

TEST_CASE("blocks are aligned, as large as asked for, and their own") {
  BufferPool pool(1 << 20);
  std::vector<std::pair<unsigned char*, size_t>> blocks;
  for (size_t bytes : {0, 1, 63, 64, 65, 256, 257, 319, 320, 321, 1000, 4096, 100000}) {
    auto* block = static_cast<unsigned char*>(pool.take(bytes));
    CHECK(reinterpret_cast<uintptr_t>(block) % 64 == 0);
    memset(block, static_cast<int>(blocks.size() + 1), bytes);
    blocks.emplace_back(block, bytes);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    for (size_t byte = 0; byte < blocks[i].second; ++byte) REQUIRE(blocks[i].first[byte] == i + 1);
  }
  CHECK(pool.statistics().live_blocks == static_cast<int64_t>(blocks.size()));
  for (const auto& [block, bytes] : blocks) pool.give_back(block);
  CHECK(pool.statistics().live_blocks == 0);
}

TEST_CASE("a block that came back is taken again for its size") {
  BufferPool pool(1 << 20);
  void* block = pool.take(1000);
  pool.give_back(block);
  CHECK(pool.statistics().cached_bytes >= 1000);
  CHECK(pool.statistics().cached_bytes <= 1280);
  CHECK(pool.take(1001) == block);
  CHECK(pool.statistics().cached_bytes == 0);
  pool.give_back(block);
}

TEST_CASE("what is kept is bounded, and the latest sizes drive out others") {
  BufferPool pool(10000);
  std::vector<void*> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(pool.take(1024));
  for (void* block : blocks) pool.give_back(block);
  CHECK(pool.statistics().cached_bytes == 9 * 1024);
  pool.give_back(pool.take(8192));
  CHECK(pool.statistics().cached_bytes <= 10000);
  CHECK(pool.statistics().cached_bytes >= 8192);
  pool.give_back(pool.take(20000));  // larger than the pool may keep in all
  CHECK(pool.statistics().cached_bytes >= 8192);
  CHECK(pool.statistics().cached_bytes <= 10000);
}

TEST_CASE("a size that no memory holds is refused") {
  BufferPool pool(1 << 20);
  CHECK_THROWS_AS(pool.take(SIZE_MAX), std::bad_alloc);
  CHECK(pool.statistics().live_blocks == 0);
}

TEST_CASE("threads take and give back each other's blocks") {
  BufferPool pool(1 << 16);
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      std::vector<void*> held;
      for (int i = 0; i < 5000; ++i) {
        const size_t bytes = static_cast<size_t>((i * 37 + number * 101) % 3000);
        held.push_back(pool.take(bytes));
        memset(held.back(), number, bytes);
        if (held.size() < 8) continue;
        std::thread([&pool, held] {
          if (held.size() % 2 == 0) pool.give_back(held[0]);
        }).join();
        for (size_t j = 1; j < held.size(); ++j) pool.give_back(held[j]);
        held.clear();
        i += 40;
      }
      for (void* block : held) pool.give_back(block);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.statistics().live_blocks == 0);
  CHECK(pool.statistics().cached_bytes <= 1 << 16);
}
