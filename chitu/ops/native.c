/* float32 CPU kernels: packed matrix product, RMS norm, rotary + append, paged attention. See native.py.
 *
 * Plain C with GCC vector extensions; LANES follows the instruction set. One register tile (`tile`) serves the linear
 * layers, q k^T and p v. Weights are packed as panels `[out / 32][in][32]`, so the tile reads them in order. KV pages
 * are `[pages, kv_heads, page_size, head_dim]`. All index arrays are int64. Nothing here allocates or keeps state.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define MAX_ROWS 12
#elif defined(__AVX__)
#define LANES 8
#define MAX_ROWS 3
#else
#define LANES 4
#define MAX_ROWS 3
#endif
#define PANEL 32
#define VECTORS (PANEL / LANES)
#define QUERY_BLOCK 64
#define KEY_BLOCK 64
#define MAX_HEAD_DIM 256
#define MAX_GROUP 16

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline vf load(const float *p) { return *(const vf *)p; }
static inline void store(float *p, vf v) { *(vf *)p = v; }
static inline vf splat(float x) { return x - (vf){}; }

static inline vf vmax(vf a, vf b) {
    vi larger = a > b;
    return (vf)(((vi)a & larger) | ((vi)b & ~larger));
}

/* Butterfly reduction: lanes combine across halves, then quarters, ...; after log2(LANES) steps all lanes agree. */
#if LANES == 16
#define HALVES(v, op)                                                                                           \
    v = op(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));             \
    v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));             \
    v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));             \
    v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define HALVES(v, op)                                                      \
    v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));      \
    v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));      \
    v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define HALVES(v, op)                                      \
    v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));  \
    v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif
#define PLUS(a, b) ((a) + (b))

static inline float sum(vf v) {
    HALVES(v, PLUS)
    return v[0];
}

static inline float maximum(vf v) {
    HALVES(v, vmax)
    return v[0];
}

/* e^x within 2 ulp for x <= 88; below -87 the result is 0, which a softmax needs. */
static inline vf vexp(vf x) {
    vf low = splat(-87.0f), high = splat(88.0f);
    vi under = x < low;
    x = (vf)(((vi)x & ~under) | ((vi)low & under));
    vi over = x > high;
    x = (vf)(((vi)x & ~over) | ((vi)high & over));
    vf n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* round to nearest */
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)exponent) & ~under);
}

/* acc[r][:] = sum over i of x[r][i] * b[i][0:32]. `rows` is constant at every call, so acc stays in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const float *x, int64_t x_stride, const float *b,
                                                       int64_t b_stride, int64_t inner, vf acc[][VECTORS]) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = (vf){};
    for (int64_t i = 0; i < inner; i++) {
        vf column[VECTORS];
        for (int v = 0; v < VECTORS; v++) column[v] = load(b + i * b_stride + v * LANES);
        __builtin_prefetch(b + i * b_stride + 16 * PANEL);
        __builtin_prefetch(b + i * b_stride + 16 * PANEL + 16);
        for (int r = 0; r < rows; r++) {
            float value = x[r * x_stride + i];
            for (int v = 0; v < VECTORS; v++) acc[r][v] += value * column[v];
        }
    }
}

enum epilogue { STORE = 0, ADD = 1, GATE_UP = 2, SCALE_ADD = 3 };

static inline __attribute__((always_inline)) void finish(const int rows, vf acc[][VECTORS], float *y, int64_t y_stride,
                                                         int64_t columns, const float *bias, const float *scale,
                                                         int mode) {
    for (int r = 0; r < rows; r++) {
        if (bias)
            for (int v = 0; v < VECTORS; v++) acc[r][v] += load(bias + v * LANES);
        float *out = y + r * y_stride;
        if (mode == GATE_UP) { /* the first half of a panel is gate, the second up */
            for (int v = 0; v < VECTORS / 2; v++) {
                vf gate = acc[r][v];
                acc[r][v] = gate / (1.0f + vexp(-gate)) * acc[r][v + VECTORS / 2];
            }
        }
        if (columns == (mode == GATE_UP ? PANEL / 2 : PANEL)) {
            for (int v = 0; v < (mode == GATE_UP ? VECTORS / 2 : VECTORS); v++) {
                vf value = acc[r][v];
                if (mode == ADD) value += load(out + v * LANES);
                if (mode == SCALE_ADD) value += load(out + v * LANES) * scale[r];
                store(out + v * LANES, value);
            }
        } else {
            float spill[PANEL];
            for (int v = 0; v < VECTORS; v++) store(spill + v * LANES, acc[r][v]);
            for (int64_t c = 0; c < columns; c++) out[c] = mode == ADD ? out[c] + spill[c] : spill[c];
        }
    }
}

#define CASE(n)                                                       \
    case n: {                                                         \
        vf acc[n][VECTORS];                                           \
        tile(n, x, x_stride, b, b_stride, inner, acc);                \
        finish(n, acc, y, y_stride, columns, bias, scale, mode);      \
        break;                                                        \
    }

static inline __attribute__((always_inline)) void block(int64_t rows, const float *x, int64_t x_stride, const float *b,
                                                        int64_t b_stride, int64_t inner, float *y, int64_t y_stride,
                                                        int64_t columns, const float *bias, const float *scale,
                                                        const int mode) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3)
#if MAX_ROWS == 12
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* Multiply all rows by one panel, in blocks as equal as possible (16 rows are 8 + 8, not 12 + 4). */
static inline __attribute__((always_inline)) void panel_rows(int64_t rows, const float *x, int64_t x_stride,
                                                             const float *b, int64_t b_stride, int64_t inner, float *y,
                                                             int64_t y_stride, int64_t columns, const float *bias,
                                                             const float *scale, const int mode) {
    int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t i = 0, row = 0; i < blocks; i++) {
        int64_t count = (rows - row) / (blocks - i);
        block(count, x + row * x_stride, x_stride, b, b_stride, inner, y + row * y_stride, y_stride, columns, bias,
              scale ? scale + row : scale, mode);
        row += count;
    }
}

#define ROW_GROUP 192

/* y = x W^T (+ bias), y += ..., or silu(gate) * up. `out`: columns of y. `bias` is padded to whole panels. */
void chitu_linear(const float *x, int64_t rows, int64_t inner, const float *packed, const float *bias, float *y,
                  int64_t out, int64_t mode, int64_t threads) {
    int64_t width = mode == GATE_UP ? PANEL / 2 : PANEL;
    int64_t panels = (out + width - 1) / width, groups = (rows + ROW_GROUP - 1) / ROW_GROUP, tasks = panels * groups;
    int64_t share = tasks / (threads * 8);
    if (share < 1) share = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, share) if (threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t first = task / panels * ROW_GROUP, p = task % panels;
        int64_t count = rows - first < ROW_GROUP ? rows - first : ROW_GROUP;
        int64_t columns = out - p * width < width ? out - p * width : width;
        const float *b = packed + p * inner * PANEL, *panel_bias = bias ? bias + p * PANEL : 0, *in = x + first * inner;
        float *result = y + first * out + p * width;
        if (mode == STORE)
            panel_rows(count, in, inner, b, PANEL, inner, result, out, columns, panel_bias, 0, STORE);
        else if (mode == ADD)
            panel_rows(count, in, inner, b, PANEL, inner, result, out, columns, panel_bias, 0, ADD);
        else
            panel_rows(count, in, inner, b, PANEL, inner, result, out, columns, panel_bias, 0, GATE_UP);
    }
}

/* Weights that stay smaller than float32: codes of 4, 8 or 16 bits, those of 4 and 8 with a scale, and maybe a number to
 * add, for each output and run of inputs. They are widened to the same float32 numbers as those of a dequantised weight,
 * a chunk of a panel at a time in the L1 cache, and summed in the same order: the result has the same bits. What is added
 * must go with an exact product (see kept.py), so that it does not matter whether the compiler fuses the two. */
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
#include <immintrin.h>
#define CHUNK 128
#define DIRECT_ROWS (MAX_ROWS < 4 ? MAX_ROWS : 4) /* with more, compilers keep sums in memory */

enum form { E4M3 = 0, INT8 = 1, TABLE4 = 2, BFLOAT16 = 3, FLOAT16 = 4 };

int64_t chitu_keeps_small(void) { return 1; }

#if LANES == 16
static inline vf from_half(__m256i bits) { return (vf)_mm512_cvtph_ps(bits); }
static inline __m256i load16(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* e4m3 as float16 is 2^-8 of its number, so scales are 256 times as large. Faster than by float32, where small numbers
 * would be denormal. */
static inline vf widen_e4m3(const uint8_t *p) {
    __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i number = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x7f)), 7);
    return from_half(_mm256_or_si256(number, _mm256_slli_epi16(_mm256_srli_epi16(bits, 7), 15)));
}

static inline vf widen_int8(const uint8_t *p) {
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* 16 bytes are a row of a panel: the low halves are the codes of its first 16 outputs, the high ones of the others. */
static inline void widen_table4(const uint8_t *p, const float *table, vf out[VECTORS]) {
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); /* the permutation reads 4 bits */
    __m512 numbers = _mm512_loadu_ps(table);
    out[0] = (vf)_mm512_permutexvar_ps(codes, numbers);
    out[1] = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), numbers);
}
#else
static inline vf from_half(__m128i bits) { return (vf)_mm256_cvtph_ps(bits); }
static inline __m128i load16(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }

static inline vf widen_e4m3(const uint8_t *p) {
    __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i number = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x7f)), 7);
    return from_half(_mm_or_si128(number, _mm_slli_epi16(_mm_srli_epi16(bits, 7), 15)));
}

static inline vf widen_int8(const uint8_t *p) {
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

static inline void widen_table4(const uint8_t *p, const float *table, vf out[VECTORS]) {
    __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    for (int half = 0; half < 2; half++) {
        __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + half * 8)));
        for (int v = half; v < VECTORS; v += 2, codes = _mm256_srli_epi32(codes, 4)) {
            __m256 first = _mm256_permutevar8x32_ps(low, codes), second = _mm256_permutevar8x32_ps(high, codes);
            __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)); /* bit 3 as the sign */
            out[v] = (vf)_mm256_blendv_ps(first, second, is_high);
        }
    }
}
#endif

/* Scales, or what is added, of one run: float16 or float32. */
static inline void load_factors(const void *factors, int64_t run, int64_t is_half, vf out[VECTORS]) {
    for (int v = 0; v < VECTORS; v++) {
        int64_t at = run * PANEL + v * LANES;
        out[v] = is_half ? from_half(load16((const uint8_t *)factors + 2 * at)) : load((const float *)factors + at);
    }
}

static inline __attribute__((always_inline)) void widen_row(const int form, const uint8_t *row, const float *table,
                                                            vf out[VECTORS]) {
    if (form == TABLE4) widen_table4(row, table, out);
    if (form == BFLOAT16) { /* words of two: the low half is of one of the first 16 outputs, the high one of 16 behind */
        for (int v = 0; v < VECTORS / 2; v++) {
            vi words = *(const vi *)(row + v * LANES * 4);
            out[v] = (vf)(words << 16);
            out[v + VECTORS / 2] = (vf)(words & (int32_t)0xffff0000);
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        if (form == E4M3) out[v] = widen_e4m3(row + v * LANES);
        if (form == INT8) out[v] = widen_int8(row + v * LANES);
        if (form == FLOAT16) out[v] = from_half(load16(row + 2 * v * LANES));
    }
}

/* The parts of a kept weight, or of one panel of it. */
struct kept {
    const uint8_t *codes;
    const float *table;   /* 16 numbers; only of TABLE4 */
    const void *scales;   /* [panels][runs][32]; only of codes of 4 and 8 bits */
    const void *added;    /* the same, or none */
    int64_t is_half, run; /* whether both are float16; inputs of a run */
};

static inline int64_t row_bytes(int64_t form) {
    return form == TABLE4 ? PANEL / 2 : form == E4M3 || form == INT8 ? PANEL : 2 * PANEL;
}

/* numbers[0:32] = those of input i of a panel. `scale` and `added` are those of its run. */
static inline __attribute__((always_inline)) void widen_input(const int form, const int adds, const struct kept *w,
                                                              int64_t i, const vf scale[], const vf added[],
                                                              vf numbers[]) {
    widen_row(form, w->codes + i * row_bytes(form), w->table, numbers);
    for (int v = 0; v < VECTORS; v++) {
        if (form <= TABLE4) numbers[v] *= scale[v];
        if (adds) numbers[v] += added[v];
    }
}

/* Call `EACH(adds)` for the inputs `i` up to `end` of each run from `first` on; `adds` is constant there. */
#define EACH_RUN(form, w, first, last, EACH)                                                        \
    for (int64_t i = first, end; i < last; i = end) {                                               \
        vf scale[VECTORS], added[VECTORS];                                                          \
        end = last;                                                                                 \
        if (form <= TABLE4) {                                                                       \
            int64_t run = i / (w)->run;                                                             \
            end = (run + 1) * (w)->run < last ? (run + 1) * (w)->run : last;                        \
            load_factors((w)->scales, run, (w)->is_half, scale);                                    \
            if ((w)->added) load_factors((w)->added, run, (w)->is_half, added);                     \
        }                                                                                           \
        if (form <= TABLE4 && (w)->added)                                                           \
            for (; i < end; i++) EACH(1)                                                            \
        else                                                                                        \
            for (; i < end; i++) EACH(0)                                                            \
    }

/* out[i][0:32] = the numbers of input `first + i` of a panel. */
static inline __attribute__((always_inline)) void widen_chunk(const int form, const struct kept *w, int64_t first,
                                                              int64_t count, float *out) {
#define STORE_INPUT(adds)                                                                                  \
    {                                                                                                      \
        vf numbers[VECTORS];                                                                               \
        widen_input(form, adds, w, i, scale, added, numbers);                                              \
        for (int v = 0; v < VECTORS; v++) store(out + (i - first) * PANEL + v * LANES, numbers[v]);        \
    }
    EACH_RUN(form, w, first, first + count, STORE_INPUT)
}

/* acc[r][:] = sum over i of x[r][i] * the numbers of input i, as `tile` has it, without a buffer: for few rows. */
static inline __attribute__((always_inline)) void direct_tile(const int rows, const int form, const struct kept *w,
                                                              const float *x, int64_t x_stride, int64_t inner,
                                                              vf acc[][VECTORS]) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = (vf){};
#define ADD_INPUT(adds)                                                                                    \
    {                                                                                                      \
        vf numbers[VECTORS];                                                                               \
        __builtin_prefetch(w->codes + i * row_bytes(form) + 2048);                                         \
        widen_input(form, adds, w, i, scale, added, numbers);                                              \
        for (int r = 0; r < rows; r++) {                                                                   \
            float value = x[r * x_stride + i];                                                             \
            for (int v = 0; v < VECTORS; v++) acc[r][v] += value * numbers[v];                             \
        }                                                                                                  \
    }
    EACH_RUN(form, w, 0, inner, ADD_INPUT)
}

#define DIRECT_FORM(n, form) \
    case form: direct_tile(n, form, &panel, x + first * inner, inner, inner, acc); break;

#define DIRECT_CASE(n)                                                                                              \
    case n: {                                                                                                       \
        vf acc[n][VECTORS];                                                                                         \
        switch (form) {                                                                                             \
            DIRECT_FORM(n, E4M3) DIRECT_FORM(n, INT8) DIRECT_FORM(n, TABLE4) DIRECT_FORM(n, BFLOAT16)               \
            DIRECT_FORM(n, FLOAT16)                                                                                 \
        }                                                                                                           \
        memcpy(sums, acc, sizeof(acc));                                                                             \
        break;                                                                                                      \
    }

#define WIDEN_CASE(form) \
    case form: widen_chunk(form, &panel, at, count, wide); break;

/* acc[r][:] += sum over i of x[r][i] * b[i][0:32], in the order of `tile`. Meanwhile `step` bytes from `next` on are
 * fetched for each i. */
static inline __attribute__((always_inline)) void add_tile(const int rows, const float *x, int64_t x_stride,
                                                           const float *b, int64_t inner, const uint8_t *next,
                                                           int64_t step, vf acc[][VECTORS]) {
    for (int64_t i = 0; i < inner; i++) {
        vf column[VECTORS];
        for (int v = 0; v < VECTORS; v++) column[v] = load(b + i * PANEL + v * LANES);
        __builtin_prefetch(next + i * step);
        for (int r = 0; r < rows; r++) {
            float value = x[r * x_stride + i];
            for (int v = 0; v < VECTORS; v++) acc[r][v] += value * column[v];
        }
    }
}

#define ADD_CASE(n)                                             \
    case n: {                                                   \
        vf acc[n][VECTORS];                                     \
        memcpy(acc, sums[row], sizeof(acc));                    \
        add_tile(n, in, inner, wide, count, next, step, acc);   \
        memcpy(sums[row], acc, sizeof(acc));                    \
        break;                                                  \
    }

/* As `chitu_linear`, of a weight whose codes have this form. */
void chitu_linear_kept(const float *x, int64_t rows, int64_t inner, int64_t form, const uint8_t *codes,
                       const float *table, const void *scales, const void *added, int64_t is_half, int64_t run,
                       const float *bias, float *y, int64_t out, int64_t mode, int64_t threads) {
    int64_t width = mode == GATE_UP ? PANEL / 2 : PANEL, runs = run ? (inner + run - 1) / run : 0;
    int64_t factor_bytes = runs * PANEL * (is_half ? 2 : 4);
    int64_t panels = (out + width - 1) / width, groups = (rows + ROW_GROUP - 1) / ROW_GROUP, tasks = panels * groups;
    int64_t share = tasks / (threads * 8);
    if (share < 1) share = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, share) if (threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t first = task / panels * ROW_GROUP, p = task % panels;
        int64_t group = rows - first < ROW_GROUP ? rows - first : ROW_GROUP;
        int64_t columns = out - p * width < width ? out - p * width : width;
        int64_t blocks = (group + MAX_ROWS - 1) / MAX_ROWS;
        float wide[CHUNK * PANEL];
        vf sums[ROW_GROUP][VECTORS];
        struct kept panel = {codes + p * inner * row_bytes(form), table, 0, 0, is_half, run};
        if (scales) panel.scales = (const uint8_t *)scales + p * factor_bytes;
        if (added) panel.added = (const uint8_t *)added + p * factor_bytes;
        switch (group) {
            DIRECT_CASE(1) DIRECT_CASE(2) DIRECT_CASE(3)
#if MAX_ROWS == 12
            DIRECT_CASE(4)
#endif
            default: memset(sums, 0, group * sizeof(sums[0]));
        }
        for (int64_t at = group <= DIRECT_ROWS ? inner : 0; at < inner; at += CHUNK) {
            int64_t count = inner - at < CHUNK ? inner - at : CHUNK;
            switch (form) {
                WIDEN_CASE(E4M3) WIDEN_CASE(INT8) WIDEN_CASE(TABLE4) WIDEN_CASE(BFLOAT16) WIDEN_CASE(FLOAT16)
            }
            const uint8_t *next = panel.codes + (at + CHUNK) * row_bytes(form);
            for (int64_t i = 0, row = 0; i < blocks; i++) {
                int64_t size = (group - row) / (blocks - i), step = i ? 0 : row_bytes(form);
                const float *in = x + (first + row) * inner + at;
                switch (size) {
                    ADD_CASE(1) ADD_CASE(2) ADD_CASE(3)
#if MAX_ROWS == 12
                    ADD_CASE(4) ADD_CASE(5) ADD_CASE(6) ADD_CASE(7) ADD_CASE(8) ADD_CASE(9) ADD_CASE(10)
                    ADD_CASE(11) ADD_CASE(12)
#endif
                }
                row += size;
            }
        }
        const float *panel_bias = bias ? bias + p * PANEL : 0;
        float *result = y + first * out + p * width;
        if (mode == STORE)
            finish(group, sums, result, out, columns, panel_bias, 0, STORE);
        else if (mode == ADD)
            finish(group, sums, result, out, columns, panel_bias, 0, ADD);
        else
            finish(group, sums, result, out, columns, panel_bias, 0, GATE_UP);
    }
}
#else
int64_t chitu_keeps_small(void) { return 0; }
#endif

static inline float inverse_rms(const float *x, int64_t n, float eps) {
    vf squares = {};
    int64_t i = 0;
    float total = 0;
    for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < n; i++) total += x[i] * x[i];
    return 1.0f / sqrtf((total + sum(squares)) / n + eps);
}

void chitu_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t n, float eps,
                    int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *in = x + r * n;
        float *out = y + r * n, scale = inverse_rms(in, n, eps);
        for (int64_t i = 0; i < n; i++) out[i] = weight[i] * (in[i] * scale);
    }
}

/* One head: optional RMS norm, then the half-split rotation. */
static inline void rotate_head(const float *in, float *out, const float *norm, float eps, const float *cosine,
                               const float *sine, int64_t n) {
    float scale = norm ? inverse_rms(in, n, eps) : 1.0f;
    int64_t half = n / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = in[i], second = in[i + half];
        if (norm) {
            first = norm[i] * (first * scale);
            second = norm[i + half] * (second * scale);
        }
        out[i] = first * cosine[i] - second * sine[i];
        out[i + half] = second * cosine[i] + first * sine[i];
    }
}

/* From qkv `[rows, (heads + 2 kv_heads) * n]`, rotate q into q_out `[rows, heads, n]`, write k and v into pages. */
void chitu_rope_append(const float *qkv, float *q_out, const float *q_norm, const float *k_norm, float eps,
                       const float *cosine, const float *sine, const int64_t *slots, const int64_t *positions,
                       const int64_t *page_table, int64_t table_stride, float *k_pages, float *v_pages, int64_t rows,
                       int64_t heads, int64_t kv_heads, int64_t n, int64_t page_size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *in = qkv + r * (heads + 2 * kv_heads) * n;
        int64_t position = positions[r], page = page_table[slots[r] * table_stride + position / page_size];
        const float *c = cosine + position * (n / 2), *s = sine + position * (n / 2);
        for (int64_t h = 0; h < heads; h++)
            rotate_head(in + h * n, q_out + (r * heads + h) * n, q_norm, eps, c, s, n);
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t at = ((page * kv_heads + h) * page_size + position % page_size) * n;
            rotate_head(in + (heads + h) * n, k_pages + at, k_norm, eps, c, s, n);
            memcpy(v_pages + at, in + (heads + kv_heads + h) * n, n * sizeof(float));
        }
    }
}

/* Attention of one new token per sequence. A (row, KV head) reads K and V once for all query heads of the group.
 * `window`: last positions that a row sees, 0 for all. `sinks`: a logit of each head that gives nothing, or NULL. */
void chitu_decode_attention(const float *q, float *out, const float *k_pages, const float *v_pages,
                            const int64_t *slots, const int64_t *positions, const int64_t *page_table,
                            int64_t table_stride, int64_t rows, int64_t heads, int64_t kv_heads, int64_t n,
                            int64_t page_size, float scale, int64_t window, const float *sinks, int64_t threads) {
    int64_t group = heads / kv_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t task = 0; task < rows * kv_heads; task++) {
        int64_t r = task / kv_heads, h = task % kv_heads, length = positions[r] + 1;
        const int64_t *table = page_table + slots[r] * table_stride;
        float query[MAX_GROUP * MAX_HEAD_DIM], mixed[MAX_GROUP * MAX_HEAD_DIM], scores[MAX_GROUP][KEY_BLOCK];
        float top[MAX_GROUP], total[MAX_GROUP];
        for (int64_t i = 0; i < group * n; i++) query[i] = q[(r * heads + h * group) * n + i] * scale;
        memset(mixed, 0, group * n * sizeof(float));
        for (int64_t g = 0; g < group; g++) top[g] = sinks ? sinks[h * group + g] : -INFINITY, total[g] = sinks != 0;
        for (int64_t start = window && window < length ? length - window : 0; start < length; start += KEY_BLOCK) {
            int64_t count = length - start < KEY_BLOCK ? length - start : KEY_BLOCK;
            const float *values[KEY_BLOCK];
            int64_t index = start / page_size, offset = start % page_size; /* a division per token would dominate */
            for (int64_t j = 0; j < count; j++) {
                int64_t at = ((table[index] * kv_heads + h) * page_size + offset) * n;
                const float *key = k_pages + at;
                values[j] = v_pages + at;
                /* The hardware does not prefetch across pages: fetch V, and the same row of the next page of K. */
                int64_t later = start + j + page_size < length;
                int64_t next = later ? ((table[index + 1] * kv_heads + h) * page_size + offset) * n : at;
                for (int64_t i = 0; i < n; i += 16) {
                    __builtin_prefetch(v_pages + at + i);
                    __builtin_prefetch(k_pages + next + i);
                }
                if (++offset == page_size) offset = 0, index++;
                for (int64_t g = 0; g < group; g++) {
                    vf dot = {};
                    for (int64_t i = 0; i < n; i += LANES) dot += load(query + g * n + i) * load(key + i);
                    scores[g][j] = sum(dot);
                }
            }
            for (int64_t g = 0; g < group; g++) {
                for (int64_t j = count; j < KEY_BLOCK; j++) scores[g][j] = -INFINITY;
                vf largest = splat(top[g]);
                for (int64_t j = 0; j < KEY_BLOCK; j += LANES) largest = vmax(load(scores[g] + j), largest);
                float highest = maximum(largest);
                float keep = expf(top[g] - highest);
                vf weights = {};
                for (int64_t j = 0; j < KEY_BLOCK; j += LANES) {
                    vf e = vexp(load(scores[g] + j) - highest);
                    store(scores[g] + j, e);
                    weights += e;
                }
                total[g] = total[g] * keep + sum(weights);
                top[g] = highest;
                float *m = mixed + g * n;
                for (int64_t i = 0; i < n; i += PANEL) {
                    vf even[VECTORS], odd[VECTORS]; /* two chains of additions, since each waits for its last */
                    for (int v = 0; v < VECTORS; v++) even[v] = load(m + i + v * LANES) * keep, odd[v] = (vf){};
                    int64_t j = 0;
                    for (; j + 1 < count; j += 2)
                        for (int v = 0; v < VECTORS; v++) {
                            even[v] += scores[g][j] * load(values[j] + i + v * LANES);
                            odd[v] += scores[g][j + 1] * load(values[j + 1] + i + v * LANES);
                        }
                    for (int v = 0; v < VECTORS; v++) {
                        if (j < count) even[v] += scores[g][j] * load(values[j] + i + v * LANES);
                        store(m + i + v * LANES, even[v] + odd[v]);
                    }
                }
            }
        }
        for (int64_t g = 0; g < group; g++)
            for (int64_t i = 0; i < n; i++) out[(r * heads + h * group + g) * n + i] = mixed[g * n + i] / total[g];
    }
}

/* Transpose LANES x LANES numbers: each round interleaves the first half of the rows with the second. */
static inline __attribute__((always_inline)) void transpose(vf rows[LANES]) {
    for (int round = 1; round < LANES; round *= 2) {
        vf next[LANES];
        for (int r = 0; r < LANES / 2; r++) {
            next[2 * r] = ZIP_LOW(rows[r], rows[r + LANES / 2]);
            next[2 * r + 1] = ZIP_HIGH(rows[r], rows[r + LANES / 2]);
        }
        for (int r = 0; r < LANES; r++) rows[r] = next[r];
    }
}

/* Gather `count` tokens of one head: K as panels `[KEY_BLOCK / 32][n][32]`, V as rows. Absent tokens are zero. */
static void gather(const float *k_pages, const float *v_pages, const int64_t *table, int64_t start, int64_t count,
                   int64_t kv_heads, int64_t h, int64_t n, int64_t page_size, float *keys, float *values) {
    int64_t index = start / page_size, offset = start % page_size;
    for (int64_t j = 0; j < KEY_BLOCK; j += LANES) {
        const float *tokens[LANES];
        for (int64_t r = 0; r < LANES; r++) {
            tokens[r] = 0;
            if (j + r >= count) {
                memset(values + (j + r) * n, 0, n * sizeof(float));
                continue;
            }
            int64_t at = ((table[index] * kv_heads + h) * page_size + offset) * n;
            if (++offset == page_size) offset = 0, index++;
            tokens[r] = k_pages + at;
            memcpy(values + (j + r) * n, v_pages + at, n * sizeof(float));
        }
        float *columns = keys + j / PANEL * n * PANEL + j % PANEL;
        for (int64_t i = 0; i < n; i += LANES) {
            vf block[LANES];
            for (int r = 0; r < LANES; r++) block[r] = tokens[r] ? load(tokens[r] + i) : (vf){};
            transpose(block);
            for (int r = 0; r < LANES; r++) store(columns + (i + r) * PANEL, block[r]);
        }
    }
}

/* Attention of prompt chunks, by tasks of QUERY_BLOCK tokens of one span and one KV head, with an online softmax. */
void chitu_prefill_attention(const float *q, float *out, const float *k_pages, const float *v_pages,
                             const int64_t *spans, int64_t num_spans, const int64_t *page_table, int64_t table_stride,
                             int64_t heads, int64_t kv_heads, int64_t n, int64_t page_size, float scale,
                             int64_t window, const float *sinks, int64_t threads) {
    int64_t group = heads / kv_heads, tasks = 0;
    for (int64_t s = 0; s < num_spans; s++)
        tasks += (spans[4 * s + 1] + QUERY_BLOCK - 1) / QUERY_BLOCK * kv_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t *span = spans;
        int64_t rest = task, blocks;
        while (rest >= (blocks = (span[1] + QUERY_BLOCK - 1) / QUERY_BLOCK) * kv_heads) rest -= blocks * kv_heads, span += 4;
        int64_t h = rest % kv_heads, first = rest / kv_heads * QUERY_BLOCK;
        int64_t rows = span[1] - first < QUERY_BLOCK ? span[1] - first : QUERY_BLOCK;
        int64_t position = span[3] + first, end = position + rows;
        const int64_t *table = page_table + span[2] * table_stride;
        int64_t stride = heads * n;
        const float *query = q + (span[0] + first) * stride + h * group * n;
        float *result = out + (span[0] + first) * stride + h * group * n;
        float keys[KEY_BLOCK * MAX_HEAD_DIM], values[KEY_BLOCK * MAX_HEAD_DIM], scores[QUERY_BLOCK * KEY_BLOCK];
        float top[MAX_GROUP][QUERY_BLOCK], total[MAX_GROUP][QUERY_BLOCK], keep[QUERY_BLOCK];
        for (int64_t g = 0; g < group; g++)
            for (int64_t t = 0; t < rows; t++) {
                top[g][t] = sinks ? sinks[h * group + g] : -INFINITY, total[g][t] = sinks != 0;
                memset(result + t * stride + g * n, 0, n * sizeof(float));
            }
        for (int64_t start = window && window <= position ? position - window + 1 : 0; start < end; start += KEY_BLOCK) {
            int64_t count = end - start < KEY_BLOCK ? end - start : KEY_BLOCK;
            gather(k_pages, v_pages, table, start, count, kv_heads, h, n, page_size, keys, values);
            for (int64_t g = 0; g < group; g++) {
                for (int64_t p = 0; p < KEY_BLOCK / PANEL; p++)
                    panel_rows(rows, query + g * n, stride, keys + p * n * PANEL, PANEL, n, scores + p * PANEL,
                               KEY_BLOCK, PANEL, 0, 0, STORE);
                for (int64_t t = 0; t < rows; t++) {
                    float *s = scores + t * KEY_BLOCK;
                    int64_t visible = position + t + 1 - start;
                    if (visible > KEY_BLOCK) visible = KEY_BLOCK;
                    if (visible < 0) visible = 0;
                    for (int64_t j = visible; j < KEY_BLOCK; j++) s[j] = -INFINITY;
                    int64_t unseen = window ? position + t + 1 - window - start : 0;
                    for (int64_t j = 0; j < unseen && j < KEY_BLOCK; j++) s[j] = -INFINITY;
                    vf largest = splat(top[g][t]);
                    for (int64_t j = 0; j < KEY_BLOCK; j += LANES) {
                        vf scaled = load(s + j) * scale;
                        store(s + j, scaled);
                        largest = vmax(scaled, largest);
                    }
                    float highest = maximum(largest);
                    if (highest == -INFINITY) highest = 0; /* its window has no key of this block or those before */
                    keep[t] = expf(top[g][t] - highest);
                    vf weights = {};
                    for (int64_t j = 0; j < KEY_BLOCK; j += LANES) {
                        vf e = vexp(load(s + j) - highest);
                        store(s + j, e);
                        weights += e;
                    }
                    total[g][t] = total[g][t] * keep[t] + sum(weights);
                    top[g][t] = total[g][t] ? highest : -INFINITY;
                }
                for (int64_t i = 0; i < n; i += PANEL)
                    panel_rows(rows, scores, KEY_BLOCK, values + i, n, KEY_BLOCK, result + g * n + i, stride, PANEL, 0,
                               keep, SCALE_ADD);
            }
        }
        for (int64_t g = 0; g < group; g++)
            for (int64_t t = 0; t < rows; t++) {
                float inverse = 1.0f / total[g][t];
                for (int64_t i = 0; i < n; i++) result[t * stride + g * n + i] *= inverse;
            }
    }
}
