/* SPDX-License-Identifier: Apache-2.0 */
/* What a compiled kernel needs of its surroundings, on libc and POSIX threads alone: error messages, scratch memory,
 * parallel loops, and checks of the arguments. export.py puts MAX_DIM (the largest number of dimensions) and NARROW
 * (whether sizes have 32 bits) before this text and the public functions after it; the prefix keeps out of their way.
 */
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <tvm/runtime/c_backend_api.h>
#include <unistd.h>

/* ------------------------------------------------------------------ messages */

static __thread char rt_message[1024];

static int rt_fail(const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(rt_message, sizeof rt_message, format, values);
  va_end(values);
  return -1;
}

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  size_t used = (size_t)snprintf(rt_message, sizeof rt_message, "%s: ", kind);
  for (int32_t n = 0; n < count && used < sizeof rt_message; ++n)
    if (parts[n]) used += (size_t)snprintf(rt_message + used, sizeof rt_message - used, "%s", parts[n]);
}

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *text) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &text, 1);
}

/* ------------------------------------------------------------------ scratch memory */

static void *rt_allocate(int device_type, int device_id, uint64_t bytes, int code, int bits) {
  void *memory = NULL;
  (void)device_type, (void)device_id, (void)code, (void)bits;
  if (posix_memalign(&memory, 64, bytes ? bytes : 1) == 0) return memory;
  rt_fail("out of memory: %llu bytes of scratch", (unsigned long long)bytes);
  return NULL;
}

static int rt_release(int device_type, int device_id, void *memory) {
  (void)device_type, (void)device_id;
  free(memory);
  return 0;
}

/* ------------------------------------------------------------------ threads */

/* One parallel loop. Its caller and the workers take tasks from it until there are none, so a loop ends even if no
 * worker could be started, and loops of several callers, or inside each other, do not wait for one another. */
struct job {
  FTVMParallelLambda run;
  void *data;
  TVMParallelGroupEnv env;
  int next, open, failed;
  char message[sizeof rt_message];
  struct job *below;
};

static pthread_mutex_t rt_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t rt_some_job = PTHREAD_COND_INITIALIZER, rt_job_done = PTHREAD_COND_INITIALIZER;
static struct job *rt_jobs; /* those with tasks that nobody has taken */
static int rt_workers, rt_wanted;

static int rt_num_cores(void) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
  long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? (int)online : 1;
}

/* Waking a thread takes as long as a short kernel, so one that waits looks for work for a moment before it sleeps. It
 * looks without the lock: what it sees counts only once it has the lock. */
enum { SPIN_NANOSECONDS = 50000 };

static inline void rt_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t rt_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int rt_has_jobs(void *unused) {
  (void)unused;
  return __atomic_load_n(&rt_jobs, __ATOMIC_RELAXED) != NULL;
}

static int rt_is_done(void *job) { return __atomic_load_n(&((struct job *)job)->open, __ATOMIC_RELAXED) == 0; }

/* Called with the lock, and returns with it; threads beyond the cores would only keep the others from working. */
static void rt_spin(int (*is_over)(void *), void *argument, int threads) {
  if (is_over(argument) || threads > rt_num_cores()) return;
  pthread_mutex_unlock(&rt_lock);
  for (int64_t end = rt_now() + SPIN_NANOSECONDS; !is_over(argument) && rt_now() < end;) rt_pause();
  pthread_mutex_lock(&rt_lock);
}

static void rt_close_job(struct job *job) {
  struct job **at = &rt_jobs;
  while (*at != job) at = &(*at)->below;
  __atomic_store_n(at, job->below, __ATOMIC_RELAXED);
}

/* Called with the lock, and returns with it. */
static void rt_run_task(struct job *job) {
  int task = job->next++;
  if (job->next == job->env.num_task) rt_close_job(job);
  pthread_mutex_unlock(&rt_lock);
  int status = job->run(task, &job->env, job->data);
  pthread_mutex_lock(&rt_lock);
  if (status && !job->failed) {
    job->failed = 1;
    memcpy(job->message, rt_message, sizeof rt_message);
  }
  if (__atomic_sub_fetch(&job->open, 1, __ATOMIC_RELAXED) == 0) pthread_cond_broadcast(&rt_job_done);
}

static void *rt_work(void *unused) {
  pthread_mutex_lock(&rt_lock);
  for (;;) {
    rt_spin(rt_has_jobs, NULL, rt_workers + 1);
    while (!rt_jobs) pthread_cond_wait(&rt_some_job, &rt_lock);
    rt_run_task(rt_jobs);
  }
  return unused;
}

static int rt_start_worker(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, rt_work, NULL)) return 0;
  pthread_detach(thread);
  return 1;
}

enum { MOST_THREADS = 1024 };

static int rt_num_threads(void) {
  int wanted = __atomic_load_n(&rt_wanted, __ATOMIC_RELAXED);
  if (wanted > 0) return wanted < MOST_THREADS ? wanted : MOST_THREADS;
  return rt_num_cores();
}

static int rt_launch(FTVMParallelLambda run, void *data, int tasks) {
  if (tasks <= 0) tasks = rt_num_threads();
  struct job job = {.run = run, .data = data, .env = {NULL, tasks}, .open = tasks};
  pthread_mutex_lock(&rt_lock);
  job.below = rt_jobs;
  __atomic_store_n(&rt_jobs, &job, __ATOMIC_RELAXED);
  while (rt_workers < tasks - 1 && rt_start_worker()) ++rt_workers;
  if (tasks > 1) pthread_cond_broadcast(&rt_some_job);
  while (job.next < tasks) rt_run_task(&job);
  rt_spin(rt_is_done, &job, tasks);
  while (job.open) pthread_cond_wait(&rt_job_done, &rt_lock);
  pthread_mutex_unlock(&rt_lock);
  return job.failed ? rt_fail("%s", job.message) : 0;
}

/* A child process has none of its parent's threads. */
static void rt_forget_workers(void) {
  pthread_mutex_init(&rt_lock, NULL);
  pthread_cond_init(&rt_some_job, NULL);
  pthread_cond_init(&rt_job_done, NULL);
  rt_jobs = NULL;
  rt_workers = 0;
}

__attribute__((constructor)) static void rt_watch_forks(void) { pthread_atfork(NULL, NULL, rt_forget_workers); }

/* The machine code calls through these. */
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = rt_allocate;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = rt_release;
int (*__TVMBackendParallelLaunch)(FTVMParallelLambda, void *, int) = rt_launch;

/* ------------------------------------------------------------------ arguments */

struct array {
  const char *name;
  const void *data;
  int written;
  DLDataType dtype;
  int rank;
  int64_t shape[MAX_DIM];
  int64_t count;
  DLTensor tensor;
};

/* Sizes that 64 bits do not hold become the largest or the least number, which no array has. */
static inline int64_t rt_plus(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? (b < 0 ? INT64_MIN : INT64_MAX) : sum;
}

static inline int64_t rt_minus(int64_t a, int64_t b) {
  int64_t difference;
  return __builtin_sub_overflow(a, b, &difference) ? (b < 0 ? INT64_MAX : INT64_MIN) : difference;
}

static inline int64_t rt_times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? ((a < 0) == (b < 0) ? INT64_MAX : INT64_MIN) : product;
}

/* No size is divided by zero or less: -1 is reported as a negative size. */
static inline int64_t rt_floor_div(int64_t a, int64_t b) { return b > 0 ? a / b - (a % b < 0) : -1; }
static inline int64_t rt_floor_mod(int64_t a, int64_t b) { return b > 0 ? (a % b + b) % b : -1; }
static inline int64_t rt_smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t rt_larger(int64_t a, int64_t b) { return a > b ? a : b; }

#define MOST_ELEMENTS (INT64_MAX / 8) /* that 64 bits count the bytes of */

static int rt_check_array(struct array *a) {
  a->count = 1;
  for (int d = 0; d < a->rank; ++d) {
    long long extent = a->shape[d];
    if (extent < 0) return rt_fail("dimension %d of %s would be %lld: sizes must not be negative", d, a->name, extent);
    if (__builtin_mul_overflow(a->count, a->shape[d], &a->count)) return rt_fail("%s is too large to address", a->name);
  }
  if (a->count > MOST_ELEMENTS) return rt_fail("%s is too large to address", a->name);
  if (NARROW && a->count > INT32_MAX)
    return rt_fail("%s has %lld elements, more than 32-bit sizes can count", a->name, (long long)a->count);
  if (!a->data && a->count) return rt_fail("%s is NULL, expected %lld elements", a->name, (long long)a->count);
  return 0;
}

/* Whether 32-bit offsets count the elements of a buffer. */
__attribute__((unused)) static int rt_check_extents(const char *name, int rank, const int64_t *extents) {
  int64_t count = 1;
  for (int d = 0; d < rank; ++d) {
    if (extents[d] <= 0) return 0;
    if (__builtin_mul_overflow(count, extents[d], &count) || count > INT32_MAX)
      return rt_fail("%s has more elements than 32-bit indices can address: export the kernel with T.int64 sizes", name);
  }
  return 0;
}

static int rt_overlap(const struct array *a, const struct array *b) {
  uintptr_t start_a = (uintptr_t)a->data, start_b = (uintptr_t)b->data;
  if (!a->count || !b->count) return 0;
  return start_a < start_b + (uintptr_t)b->count * (b->dtype.bits / 8) &&
         start_b < start_a + (uintptr_t)a->count * (a->dtype.bits / 8);
}

static int rt_check_arrays(struct array *arrays, int count) {
  for (int n = 0; n < count; ++n)
    if (rt_check_array(&arrays[n])) return -1;
  for (int n = 0; n < count; ++n)
    for (int other = 0; other < count; ++other)
      if (n != other && arrays[n].written && rt_overlap(&arrays[n], &arrays[other]))
        return rt_fail("%s and %s share memory, and %s is written", arrays[n].name, arrays[other].name, arrays[n].name);
  return 0;
}

static int64_t rt_element(const struct array *a, int64_t at) {
  return a->dtype.bits == 64 ? ((const int64_t *)a->data)[at] : ((const int32_t *)a->data)[at];
}

/* Row pointers run from 0 to the number of stored entries. */
static int rt_check_offsets(const struct array *a, int64_t stored) {
  if (!a->count) return rt_fail("%s needs at least one element", a->name);
  long long first = rt_element(a, 0), last = rt_element(a, a->count - 1);
  if (first != 0) return rt_fail("%s starts at %lld, expected 0", a->name, first);
  if (last == stored) return 0;
  return rt_fail("%s ends at %lld but there are %lld stored entries", a->name, last, (long long)stored);
}

/* No index lies on an axis without elements. */
static inline int rt_check_filled(const struct array *a, int64_t length) {
  if (!a->count || length > 0) return 0;
  if (length < 0)
    return rt_fail("an axis of %s would be %lld long: sizes must not be negative", a->name, (long long)length);
  return rt_fail("%s has %lld entries of an axis of length %lld", a->name, (long long)a->count, (long long)length);
}

static TVMFFIAny rt_pass_array(struct array *a) {
  /* Generated code wants some address even for no elements. */
  a->tensor.data = a->data ? (void *)a->data : a;
  a->tensor.device = (DLDevice){kDLCPU, 0};
  a->tensor.ndim = a->rank;
  a->tensor.dtype = a->dtype;
  a->tensor.shape = a->shape;
  return (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &a->tensor};
}

static inline TVMFFIAny rt_pass_integer(int64_t value) {
  return (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = value};
}

static inline TVMFFIAny rt_pass_real(double value) {
  return (TVMFFIAny){.type_index = kTVMFFIFloat, .v_float64 = value};
}

/* ------------------------------------------------------------------ generated */
