/* ------------------------------------------------------------------ computed patterns */

/* What c_interface.py puts around the compiled functions of a program with computed patterns: it shares out the rows,
 * holds the accumulators, and allocates the results, as kernel.py of this folder does in Python. */

/* as in workspace.py, accumulators.py and selection.py */
enum { ROW_WORK = 8, SERIAL_WORK = 20000, WORD = 64, BYTES = 8, DUMPS = 256, LANES = 16 };

typedef int (*rt_function)(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);

struct result {
  DLDataType dtype, held;
  uint64_t initial; /* the bits of an element before the first statement sets it */
  void **out;
  int has_block;
  int64_t block; /* how many elements a coordinate has */
};

struct assembly {
  rt_function bound, symbolic, numeric; /* without `bound` the rows of `members` are merged */
  int is_stamped;                       /* rows are collected in the order of a mask, without `symbolic` */
  int is_table;                         /* rows are collected in hash tables */
  const TVMFFIAny *common;
  int common_count;
  int64_t rows, width;
  const int64_t *lengths; /* of the axes below a row, then of those of blocks */
  int axis_count, length_count;
  DLDataType key;
  const struct result *results;
  int result_count, filter_count;
  const struct array *const *members;
  int member_count, is_union;
  int64_t **indptr;
  void **keys;
  int selects;  /* the `top` largest entries of a row, all if that is 0, of those that are at least `least` */
  int64_t top;
  TVMFFIAny least;
  DLDataType ordered; /* of a value that is compared */
};

static const DLDataType RT_LONG = {kDLInt, 64, 1}, RT_INT = {kDLInt, 32, 1}, RT_BYTE = {kDLUInt, 8, 1};

/* Memory of one call; `rt_drop` frees it. */
struct held {
  void **memory;
  int count, room, failed;
};

static void *rt_hold(struct held *held, int64_t count, int64_t item) {
  void *memory = NULL;
  int64_t bytes;
  if (held->failed) return NULL;
  if (held->count == held->room) {
    void **more = realloc(held->memory, (size_t)(held->room + 32) * sizeof *more);
    if (more) held->memory = more, held->room += 32;
  }
  if (held->count == held->room || __builtin_mul_overflow(count, item, &bytes) ||
      posix_memalign(&memory, 64, bytes > 0 ? (size_t)bytes : 1)) {
    held->failed = rt_fail("out of memory: %lld elements of %lld bytes", (long long)count, (long long)item);
    return NULL;
  }
  return held->memory[held->count++] = memory;
}

static void *rt_hold_zeros(struct held *held, int64_t count, int64_t item) {
  void *memory = rt_hold(held, count, item);
  return memory ? memset(memory, 0, (size_t)(count * item)) : NULL;
}

static void rt_drop(struct held *held) {
  for (int n = 0; n < held->count; ++n) free(held->memory[n]);
  free(held->memory);
}

/* Arguments of one compiled function. */
struct arguments {
  TVMFFIAny *values;
  struct array *arrays;
  int count, array_count;
};

static int rt_start(struct arguments *a, const struct assembly *s, struct held *held) {
  int most = s->common_count + 32 + 2 * s->result_count + s->filter_count;
  a->values = rt_hold(held, most, sizeof *a->values);
  a->arrays = rt_hold_zeros(held, most, sizeof *a->arrays);
  if (held->failed) return -1;
  memcpy(a->values, s->common, (size_t)s->common_count * sizeof *a->values);
  a->count = s->common_count;
  a->array_count = 0;
  return 0;
}

static void rt_push(struct arguments *a, int64_t value) { a->values[a->count++] = rt_pass_integer(value); }

static void rt_push_table(struct arguments *a, const void *data, DLDataType dtype, int rank, int64_t n, int64_t m) {
  struct array *array = &a->arrays[a->array_count++];
  array->data = data;
  array->dtype = dtype;
  array->rank = rank;
  array->shape[0] = n;
  if (rank > 1) array->shape[1] = m;
  a->values[a->count++] = rt_pass_array(array);
}

static void rt_push_array(struct arguments *a, const void *data, DLDataType dtype, int64_t count) {
  rt_push_table(a, data, dtype, 1, count, 0);
}

/* An array whose last axis is the block of a result, where that has one. */
static void rt_push_blocks(struct arguments *a, const void *data, DLDataType dtype, int rank, int64_t n, int64_t m,
                           const struct result *result) {
  rt_push_table(a, data, dtype, rank, n, m);
  struct array *array = &a->arrays[a->array_count - 1];
  if (!result->has_block) return;
  array->shape[array->rank++] = result->block;
  --a->count;
  a->values[a->count++] = rt_pass_array(array);
}

static int rt_run(rt_function function, const struct arguments *a) {
  TVMFFIAny result = {0};
  return function(NULL, a->values, a->count, &result);
}

/* How many words have a bit for each of so many coordinates, or bytes for each of so many blocks. */
static int64_t rt_groups(int64_t count, int64_t of) { return count / of + (count % of > 0); }

/* The accumulators of all chunks. */
struct work {
  int64_t width, words, tops, highs; /* of an array, of its marks, and of what is above those */
  void **arrays, **masks;
  void *bits, *bytes, *top, *high;
  void *seen, *places; /* where rows are collected in the order of a mask */
};

static void rt_fill(void *memory, int64_t count, int item, uint64_t bits) {
  for (int64_t n = 0; n < count; ++n) memcpy((char *)memory + n * item, &bits, (size_t)item);
}

/* An array for each result with `row` elements for each chunk. */
static void rt_take_arrays(struct work *w, const struct assembly *s, int chunks, int64_t row, struct held *held) {
  w->arrays = rt_hold(held, s->result_count, sizeof(void *));
  for (int n = 0; n < s->result_count && !held->failed; ++n) {
    int item = s->results[n].held.bits / 8;
    int64_t count = rt_times(rt_times(chunks, row), s->results[n].block);
    w->arrays[n] = rt_hold(held, count, item);
    if (w->arrays[n]) rt_fill(w->arrays[n], count, item, s->results[n].initial);
  }
}

static int rt_take_stamps(struct work *w, const struct assembly *s, int chunks, struct held *held) {
  int64_t row = rt_plus(s->width, DUMPS);
  rt_take_arrays(w, s, chunks, row, held);
  w->seen = rt_hold_zeros(held, rt_times(chunks, row), 1);
  w->places = rt_hold(held, rt_times(chunks, s->width), 4);
  for (int64_t n = 0; !held->failed && n < chunks * s->width; ++n)
    ((int32_t *)w->places)[n] = (int32_t)(n % s->width & (DUMPS - 1));
  return held->failed;
}

static void rt_push_stamps(struct arguments *a, const struct work *w, const struct assembly *s, int chunks) {
  rt_push(a, s->width + DUMPS);
  rt_push(a, s->width);
  for (int n = 0; n < s->result_count; ++n)
    rt_push_blocks(a, w->arrays[n], s->results[n].held, 2, chunks, s->width + DUMPS, &s->results[n]);
  rt_push_table(a, w->seen, RT_BYTE, 2, chunks, s->width + DUMPS);
  rt_push_table(a, w->places, RT_INT, 2, chunks, s->width);
}

/* The rows shared out: chunk c has those from ranges[c] to ranges[c + 1]. */
struct split {
  int chunks;
  int64_t *ranges, *bound;
};

static int64_t rt_largest(const struct assembly *s, const struct split *split) {
  int64_t largest = 1;
  for (int64_t row = 0; row < s->rows; ++row) largest = split->bound[row] > largest ? split->bound[row] : largest;
  return largest;
}

static int rt_take_tables(struct work *w, const struct assembly *s, const struct split *split, struct held *held) {
  int64_t largest = rt_largest(s, split);
  w->width = w->words = INT64_C(2) << (64 - __builtin_clzll((unsigned long long)largest));
  w->tops = w->highs = 0;
  rt_take_arrays(w, s, split->chunks, w->width, held);
  w->bits = rt_hold_zeros(held, rt_times(split->chunks, w->words), 8);
  return held->failed;
}

static int rt_take_masks(struct work *w, const struct assembly *s, int chunks, struct held *held) {
  int64_t words = rt_groups(s->width, WORD);
  w->masks = rt_hold(held, s->filter_count, sizeof(void *));
  for (int n = 0; n < s->filter_count && !held->failed; ++n)
    w->masks[n] = rt_hold_zeros(held, rt_times(chunks, words), 8);
  return held->failed;
}

static int rt_take(struct work *w, const struct assembly *s, int chunks, struct held *held) {
  w->width = s->width;
  w->words = rt_groups(s->width, WORD);
  w->tops = rt_groups(w->words, WORD) * WORD;
  w->highs = rt_groups(w->tops / WORD, BYTES) * BYTES;
  w->bits = rt_hold_zeros(held, rt_times(chunks, w->words), 8);
  w->bytes = rt_hold_zeros(held, rt_times(chunks, rt_times(w->words, WORD)), 1);
  w->top = rt_hold_zeros(held, rt_times(chunks, w->tops), 1);
  w->high = rt_hold_zeros(held, rt_times(chunks, w->highs), 1);
  rt_take_arrays(w, s, chunks, s->width, held);
  return held->failed;
}

static void rt_push_work(struct arguments *a, const struct work *w, const struct assembly *s, int chunks, int values) {
  int64_t words = rt_groups(s->width, WORD);
  if (values) rt_push(a, w->width);
  rt_push(a, w->words);
  rt_push(a, w->tops);
  rt_push(a, w->highs);
  for (int n = 0; values && n < s->result_count; ++n)
    rt_push_blocks(a, w->arrays[n], s->results[n].held, 2, chunks, w->width, &s->results[n]);
  rt_push_table(a, w->bits, RT_LONG, 2, chunks, w->words);
  if (!s->is_table) {
    rt_push_table(a, w->bytes, RT_BYTE, 2, chunks, w->words * WORD);
    rt_push_table(a, w->top, RT_BYTE, 2, chunks, w->tops);
    rt_push_table(a, w->high, RT_BYTE, 2, chunks, w->highs);
  }
  if (s->filter_count) rt_push(a, words);
  for (int n = 0; n < s->filter_count; ++n) rt_push_table(a, w->masks[n], RT_LONG, 2, chunks, words);
}

static void rt_push_split(struct arguments *a, const struct split *split, const struct assembly *s) {
  rt_push(a, split->chunks);
  rt_push_array(a, split->ranges, RT_LONG, split->chunks + 1);
  if (s->bound) rt_push_array(a, split->bound, RT_LONG, s->rows);
}

/* The work up to the end of a row: what merged rows store, or what `bound` counted. */
static int64_t rt_work_before(const struct assembly *s, const int64_t *cost, int64_t row) {
  int64_t work = ROW_WORK * row;
  if (cost) return row ? cost[row - 1] : 0;
  for (int n = 0; n < s->member_count; ++n) work += rt_element(s->members[n], row);
  return work;
}

static int rt_share_out(struct split *split, const struct assembly *s, struct held *held) {
  int threads = rt_num_threads();
  int64_t *cost = NULL;
  if (s->bound) {
    struct arguments a;
    cost = rt_hold(held, s->rows, 8);
    split->bound = rt_hold(held, s->rows, 8);
    if (rt_start(&a, s, held)) return -1;
    rt_push(&a, s->rows > SERIAL_WORK ? threads : 1);
    rt_push_array(&a, cost, RT_LONG, s->rows);
    rt_push_array(&a, split->bound, RT_LONG, s->rows);
    if (s->rows && rt_run(s->bound, &a)) return -1;
    for (int64_t row = 1; row < s->rows; ++row) cost[row] += cost[row - 1];
  }
  int64_t total = rt_work_before(s, cost, s->rows);
  int64_t chunks = total <= SERIAL_WORK ? 1 : threads < s->rows ? threads : s->rows;
  split->chunks = chunks > 1 ? (int)chunks : 1;
  split->ranges = rt_hold_zeros(held, split->chunks + 1, 8);
  if (held->failed) return -1;
  for (int c = 1; c < split->chunks; ++c) {
    int64_t low = split->ranges[c - 1], high = s->rows, wanted = total / split->chunks * c;
    while (low < high) {
      int64_t middle = low + (high - low) / 2;
      if (rt_work_before(s, cost, middle) < wanted) low = middle + 1;
      else high = middle;
    }
    split->ranges[c] = low;
  }
  split->ranges[split->chunks] = s->rows;
  return 0;
}

/* Where each chunk begins: the end of the one before, as far as is known yet. */
static int64_t rt_merged_places(const struct assembly *s, const struct split *split, int64_t *first) {
  int64_t total = 0;
  for (int c = 0; c < split->chunks; ++c) {
    int64_t sum = 0, least = INT64_MAX;
    first[c] = total;
    for (int n = 0; n < s->member_count; ++n) {
      int64_t count = rt_element(s->members[n], split->ranges[c + 1]) - rt_element(s->members[n], split->ranges[c]);
      sum += count;
      least = count < least ? count : least;
    }
    total += s->is_union ? sum : least + 1;
  }
  return total;
}

/* As many entries as each row has at most. Before the largest of a row are chosen all of it stand there. */
static int64_t rt_bounded_places(const struct assembly *s, const struct split *split, int64_t *first) {
  int64_t total = 0;
  for (int c = 0; c < split->chunks; ++c) {
    int64_t largest = 0;
    first[c] = total;
    for (int64_t row = split->ranges[c]; row < split->ranges[c + 1]; ++row) {
      int64_t count = split->bound[row];
      largest = count > largest ? count : largest;
      total += s->selects && s->top > 0 && s->top < count ? s->top : count;
    }
    if (s->selects && s->top > 0) total += largest;
    if (s->is_stamped) ++total; /* rows under a mask write one ahead */
  }
  if (s->selects) total += LANES; /* which are read behind the last row */
  return total;
}

static int64_t rt_counted_places(const struct assembly *s, const struct split *split, int64_t *first, int64_t *indptr) {
  for (int64_t row = 0; row < s->rows; ++row) indptr[row + 1] += indptr[row];
  for (int c = 0; c < split->chunks; ++c) first[c] = indptr[split->ranges[c]];
  return indptr[s->rows];
}

static int rt_symbolic(const struct assembly *s, const struct split *split, const struct work *work, int64_t *length,
                       struct held *held) {
  struct arguments a;
  if (rt_start(&a, s, held)) return -1;
  rt_push_split(&a, split, s);
  rt_push_array(&a, length, RT_LONG, s->rows);
  rt_push_work(&a, work, s, split->chunks, 0);
  return rt_run(s->symbolic, &a);
}

/* Rows that are merged are checked on the way. */
static int rt_merge(const struct assembly *s, struct arguments *a, int chunks, struct held *held) {
  int64_t *faults = rt_hold_zeros(held, chunks, 8);
  if (held->failed) return -1;
  rt_push_array(a, faults, RT_LONG, chunks);
  int status = rt_run(s->numeric, a);
  for (int c = 0; status == 0 && c < chunks; ++c)
    if (faults[c]) return rt_fail("the rows that are merged must be sorted, each coordinate once");
  return status;
}

static int rt_numeric(const struct assembly *s, const struct split *split, const struct work *work, int64_t *ends,
                      int64_t capacity, int64_t *first, struct held *held) {
  struct arguments a;
  if (rt_start(&a, s, held)) return -1;
  rt_push_split(&a, split, s);
  rt_push_array(&a, ends, RT_LONG, s->rows);
  rt_push(&a, capacity);
  rt_push_array(&a, first, RT_LONG, split->chunks);
  rt_push_array(&a, *s->keys, s->key, capacity);
  for (int n = 0; n < s->result_count; ++n)
    rt_push_blocks(&a, *s->results[n].out, s->results[n].dtype, 1, capacity, 0, &s->results[n]);
  if (!s->bound) return rt_merge(s, &a, split->chunks, held);
  if (s->is_stamped) rt_push_stamps(&a, work, s, split->chunks);
  else rt_push_work(&a, work, s, split->chunks, 1);
  if (s->selects) {
    int64_t largest = rt_largest(s, split), most = s->top > 0 && s->top < largest ? s->top : largest;
    void *heap = rt_hold(held, rt_times(split->chunks, most), s->ordered.bits / 8);
    if (held->failed) return -1;
    rt_push(&a, most);
    a.values[a.count++] = s->least;
    rt_push_table(&a, heap, s->ordered, 2, split->chunks, most);
  }
  return rt_run(s->numeric, &a);
}

/* Bytes of a coordinate, or of what result n has for one. */
static int64_t rt_item(const struct assembly *s, int n) {
  return n < 0 ? s->key.bits / 8 : rt_times(s->results[n].dtype.bits / 8, s->results[n].block);
}

/* Chunks that were written without counting stand where they begin at most: move them together. */
static void rt_close_gaps(const struct assembly *s, const struct split *split, const int64_t *first) {
  int64_t filled = 0, *indptr = *s->indptr;
  for (int c = 0; c < split->chunks; ++c) {
    int64_t begin = split->ranges[c], end = split->ranges[c + 1];
    int64_t count = end > begin ? indptr[end] - first[c] : 0;
    for (int n = -1; n < s->result_count; ++n) {
      char *data = n < 0 ? *s->keys : *s->results[n].out;
      int64_t item = rt_item(s, n);
      memmove(data + filled * item, data + first[c] * item, (size_t)(count * item));
    }
    for (int64_t row = begin; row < end; ++row) indptr[row + 1] += filled - first[c];
    filled += count;
  }
  for (int n = -1; n < s->result_count; ++n) {
    void **out = n < 0 ? s->keys : s->results[n].out;
    size_t item = (size_t)rt_item(s, n);
    void *smaller = realloc(*out, filled * item ? (size_t)filled * item : 1);
    if (smaller) *out = smaller;
  }
}

/* The caller frees these with free(): each has memory of its own. */
static int rt_allocate_entries(const struct assembly *s, int64_t count) {
  for (int n = -1; n < s->result_count; ++n) {
    int64_t bytes;
    int is_large = __builtin_mul_overflow(count, rt_item(s, n), &bytes);
    void *memory = is_large ? NULL : malloc(bytes ? (size_t)bytes : 1);
    if (!memory) return rt_fail("out of memory: a result of %lld entries", (long long)count);
    *(n < 0 ? s->keys : s->results[n].out) = memory;
  }
  return 0;
}

static int rt_fill_results(const struct assembly *s, struct held *held) {
  struct split split = {0};
  struct work work;
  if (rt_share_out(&split, s, held)) return -1;
  if (s->is_table && s->bound ? rt_take_tables(&work, s, &split, held)
                              : (s->is_stamped ? rt_take_stamps : rt_take)(&work, s, split.chunks, held))
    return -1;
  if (rt_take_masks(&work, s, split.chunks, held)) return -1;
  int64_t *indptr = *s->indptr = calloc((size_t)s->rows + 1, 8), *first = rt_hold_zeros(held, split.chunks, 8), count;
  if (!indptr) return rt_fail("out of memory: %lld row pointers", (long long)s->rows + 1);
  if (held->failed) return -1;
  if (s->symbolic && s->rows && rt_symbolic(s, &split, &work, indptr + 1, held)) return -1;
  if (s->symbolic) count = rt_counted_places(s, &split, first, indptr);
  else count = s->bound ? rt_bounded_places(s, &split, first) : rt_merged_places(s, &split, first);
  if (rt_allocate_entries(s, count)) return -1;
  if (s->rows && count && rt_numeric(s, &split, &work, indptr + 1, count, first, held)) return -1;
  if (!s->symbolic) rt_close_gaps(s, &split, first);
  return 0;
}

/* A caller that does not look at the return code still frees nothing that is not there. */
static int rt_clear_places(void **const *places, const char *const *names, int count) {
  for (int n = 0; n < count; ++n)
    if (places[n]) *places[n] = NULL;
  for (int n = 0; n < count; ++n) {
    if (!places[n]) return rt_fail("%s is NULL, expected the address of a pointer for the result", names[n]);
    for (int other = 0; other < n; ++other)
      if (places[n] == places[other])
        return rt_fail("%s and %s are the same address, expected one for each result", names[other], names[n]);
  }
  return 0;
}

static int rt_check_sizes(struct assembly *s) {
  int64_t width = 1;
  if (s->selects && s->top < 0) return rt_fail("top is %lld, expected 0 or more", (long long)s->top);
  int is_negative = s->rows < 0;
  for (int n = 0; n < s->length_count; ++n) is_negative |= s->lengths[n] < 0;
  if (is_negative) return rt_fail("the result would be of a negative size: sizes must not be negative");
  for (int n = 0; n < s->axis_count; ++n) width = rt_times(width, s->lengths[n]);
  if (width == INT64_MAX && s->axis_count > 1)
    return rt_fail("a row of the result has more coordinates than 64 bits can count");
  s->width = s->bound ? width : 0; /* merged rows need no accumulators */
  return 0;
}

/* The results are NULL when it begins. */
static int rt_assemble(struct assembly *s) {
  struct held held = {0};
  if (rt_check_sizes(s)) return -1;
  int status = rt_fill_results(s, &held);
  rt_drop(&held);
  if (status == 0) return 0;
  free(*s->indptr), free(*s->keys);
  *s->indptr = NULL, *s->keys = NULL;
  for (int n = 0; n < s->result_count; ++n) free(*s->results[n].out), *s->results[n].out = NULL;
  return -1;
}
