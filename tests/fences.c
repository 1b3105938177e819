// SPDX-License-Identifier: Apache-2.0
// Memory between unreadable pages, for numpy's arrays and for what compiled functions allocate themselves.
//
// A block ends where such a page begins, or begins where one ends; the rest of its own pages holds a pattern that must
// still be there when it is freed. What is freed is unreadable at once. New memory holds a byte again and again.

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { REST = 0xa5, MOST_FILLED = 1 << 20, WORKSPACE_ALIGNMENT = 64 };

typedef struct {
  size_t size, mapped;
  char *data;
} Block;  // in the page before a block, which is unreadable until the block is freed

static size_t page;
static int begins = 0, fill = 0x7f;
static int64_t made[2];  // blocks for arrays, and for compiled functions

__attribute__((constructor)) static void look(void) { page = sysconf(_SC_PAGESIZE); }

void fences_place(int at_begin, int filled) { begins = at_begin, fill = filled; }
int64_t fences_made(int which) { return __atomic_load_n(&made[which], __ATOMIC_RELAXED); }

static void protect(void *begin, int how) {
  if (!mprotect(begin, page, how)) return;
  perror("fences: mprotect");
  abort();
}

static void *fenced(size_t size, size_t alignment, int which) {
  size_t room = (size + page - 1) / page * page;
  if (room < size || room + 2 * page < room) return NULL;
  char *base = mmap(NULL, room + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return NULL;
  char *start = base + page, *data = begins ? start : start + (room - size) / alignment * alignment;
  Block *block = (Block *)base;
  block->size = size, block->mapped = room + 2 * page, block->data = data;
  memset(start, REST, data - start);
  memset(data + size, REST, start + room - data - size);
  protect(base, PROT_NONE), protect(start + room, PROT_NONE);
  __atomic_fetch_add(&made[which], 1, __ATOMIC_RELAXED);
  return data;
}

static void *filled(char *data, size_t size) {
  if (data) memset(data, fill, size < MOST_FILLED ? size : MOST_FILLED);
  return data;
}

static void check(Block *block, const char *begin, const char *end, const char *where) {
  for (const char *at = begin; at < end; ++at) {
    if ((unsigned char)*at == REST) continue;
    fprintf(stderr, "a byte %s a block of %zu bytes was written, %td from its start\n", where, block->size,
            at - block->data);
    abort();
  }
}

static Block *opened(void *data) {
  char *start = (char *)((uintptr_t)data / page * page);
  Block *block = (Block *)(start - page);
  protect(block, PROT_READ | PROT_WRITE);
  check(block, start, block->data, "before");
  check(block, block->data + block->size, (char *)block + block->mapped - page, "after");
  return block;
}

static void *array_malloc(void *context, size_t size) {
  return filled(fenced(size, 1, 0), size);
}

static void *array_calloc(void *context, size_t count, size_t size) {
  size_t bytes;
  return __builtin_mul_overflow(count, size, &bytes) ? NULL : fenced(bytes, 1, 0);
}

static void array_free(void *context, void *data, size_t size) {
  if (!data) return;
  Block *block = opened(data);
  munmap(block, block->mapped);
}

static void *array_realloc(void *context, void *data, size_t size) {
  char *other = array_malloc(context, size);
  if (!other || !data) return other;
  Block *block = opened(data);
  memcpy(other, data, size < block->size ? size : block->size);
  munmap(block, block->mapped);
  return other;
}

// As numpy's PyDataMem_Handler.
struct {
  char name[127];
  uint8_t version;
  void *context;
  void *(*malloc)(void *, size_t);
  void *(*calloc)(void *, size_t, size_t);
  void *(*realloc)(void *, void *, size_t);
  void (*free)(void *, void *, size_t);
} fences_handler = {"fences", 1, NULL, array_malloc, array_calloc, array_realloc, array_free};

// Instead of TVM's, where this library is loaded first.
void *TVMBackendAllocWorkspace(int device_type, int device, uint64_t size, int code, int bits) {
  return filled(fenced(size, WORKSPACE_ALIGNMENT, 1), size);
}

int TVMBackendFreeWorkspace(int device_type, int device, void *data) {
  array_free(NULL, data, 0);
  return 0;
}
