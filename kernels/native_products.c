/* Products of block-quantized weights. */
#include "native.h"

#define AHEAD 16        /* blocks that are called for while one is multiplied: the machine itself starts too late */
#define MOST_AT_ONCE 16 /* groups of outputs that a thread claims, */
#define MANY 32         /* of more rows than these only one */

INLINE vf halves(const uint16_t *p)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    vf out;
    for (int i = 0; i < LANES; i++) {
        _Float16 half;
        memcpy(&half, p + i, 2);
        out[i] = half;
    }
    return out;
#endif
}

/* Unsigned 4-bit code j of each lane's word. */
INLINE vf code4(vu word, int j)
{
    vu moved = word >> (4 * j);
#if defined(__AVX512F__)
    const vf levels = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)moved, (__m512)levels); /* looks at the low 4 bits only */
#else
    return __builtin_convertvector((vi)(moved & 15), vf);
#endif
}

/* Signed 8-bit code j of each lane's word. */
INLINE vf code8(vu word, int j) { return __builtin_convertvector((vi)(word << (24 - 8 * j)) >> 24, vf); }

/* 16 outputs of ROWS rows. codes [blocks][BITS][16] words of 32 / BITS codes; scale, least [blocks][16] fp16;
 * sums [blocks][apart] of x's blocks, ROWS of each. */
INLINE void product(int bits, int rows, long blocks, const uint32_t *codes, const uint16_t *scale,
                    const uint16_t *least, const float *x, long x_stride, const float *sums, long apart, vf *out)
{
    vf acc[8];
    const int chains = rows == 1 ? 4 : rows == 2 ? 2 : 1; /* sums under way at once: one alone waits for itself */
    for (int r = 0; r < rows; r++)
        acc[r] = all(0);
    for (long b = 0; b < blocks; b++) {
        vf part[8][4];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < chains; c++)
                part[r][c] = all(0);
        for (int w = 0; w < bits; w++) {
            vu word = *(const vu_any *)(codes + (b * bits + w) * LANES);
            __builtin_prefetch(codes + ((b + AHEAD) * bits + w) * LANES, 0, 2);
#pragma GCC unroll 8
            for (int j = 0; j < 32 / bits; j++) {
                vf q = bits == 4 ? code4(word, j) : code8(word, j);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    part[r][j % chains] += q * x[r * x_stride + b * BLOCK + w * (32 / bits) + j];
            }
        }
        vf d = halves(scale + b * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf sum = part[r][0];
            for (int c = 1; c < chains; c++)
                sum += part[r][c];
            acc[r] += d * sum;
        }
        if (bits == 4) {
            vf m = halves(least + b * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r] += m * sums[b * apart + r];
        }
    }
    for (int r = 0; r < rows; r++)
        out[r] = acc[r];
}

/* The same from activations of 8 bits: sums of whole numbers are exact, so a row's result has the same bits in every
 * step. x [ROWS][in] in the order of ``quantized``; sums of its blocks. Needs VNNI. */
INLINE void product_of_codes(int bits, int rows, long blocks, const uint32_t *codes, const uint16_t *scale,
                             const uint16_t *least, const int8_t *x, long x_stride, const float *sums, long apart,
                             vf *out)
{
#if defined(__AVX512VNNI__)
    vf acc[8];
    for (int r = 0; r < rows; r++)
        acc[r] = all(0);
    for (long b = 0; b < blocks; b++) {
        __m512i part[8];
        for (int r = 0; r < rows; r++)
            part[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int w = 0; w < bits; w++) {
            vu word = *(const vu_any *)(codes + (b * bits + w) * LANES);
            __builtin_prefetch(codes + ((b + AHEAD) * bits + w) * LANES, 0, 2);
            vu four[2] = {bits == 4 ? word & 0x0f0f0f0f : word ^ 0x80808080, (word >> 4) & 0x0f0f0f0f};
#pragma GCC unroll 2
            for (int h = 0; h < 8 / bits; h++)
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    int32_t xs;
                    memcpy(&xs, x + r * x_stride + b * BLOCK + (w * (8 / bits) + h) * 4, 4);
                    part[r] = _mm512_dpbusd_epi32(part[r], (__m512i)four[h], _mm512_set1_epi32(xs));
                }
        }
        vf d = halves(scale + b * LANES), m = bits == 4 ? halves(least + b * LANES) : d * -128.0f;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            acc[r] += m * sums[b * apart + r];
            acc[r] += d * (vf)_mm512_cvtepi32_ps(part[r]);
        }
    }
    for (int r = 0; r < rows; r++)
        out[r] = acc[r];
#else
    (void)bits, (void)blocks, (void)codes, (void)scale, (void)least, (void)x, (void)x_stride, (void)sums, (void)apart;
    for (int r = 0; r < rows; r++)
        out[r] = all(NAN); /* ew_has_codes says that this can't be */
#endif
}

void norm_row(const float *x, const float *weight, float eps, long n, float *out)
{
    vf squares[2] = {all(0), all(0)};
    long i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int c = 0; c < 2; c++) {
            vf v = load(x + i + c * LANES);
            squares[c] += v * v;
        }
    float sum = total(squares[0] + squares[1]);
    for (; i < n; i++)
        sum += x[i] * x[i];
    float factor = 1.0f / sqrtf(sum / n + eps);
    for (i = 0; i + LANES <= n; i += LANES)
        store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < n; i++)
        out[i] = x[i] * factor * weight[i];
}

/* One row to whole numbers from -127 to 127; returns its step. With 4-bit weights, each 8 are put as 0 2 4 6 1 3 5 7,
 * which is how their codes come out of a word. What is not finite becomes 0 and makes the step so too. Needs VNNI. */
static float quantized(const float *x, long n, int bits, int8_t *out, float *sums, long apart)
{
    vf most = all(1e-12f), wrong = all(0);
    for (long i = 0; i < n; i += LANES) {
        vf v = load(x + i), size = (vf)((vi)v & 0x7fffffff);
        most = either(size > most, size, most);
        wrong += v * 0.0f; /* NaN when any of them is not finite */
    }
    float largest = 0;
    for (int i = 0; i < LANES; i++)
        largest = most[i] > largest ? most[i] : largest;
#if defined(__AVX512VNNI__)
    const __m128i as_words = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    vf factor = all(127.0f / largest);
    for (long b = 0; b < n / BLOCK; b++) {
        __m512i sum = _mm512_setzero_si512();
        for (long i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES) {
            __m512 scaled = (__m512)(load(x + i) * factor);
            __mmask16 sound = _mm512_cmp_ps_mask(_mm512_abs_ps(scaled), _mm512_set1_ps(127.5f), _CMP_LE_OQ);
            __m512i codes = _mm512_maskz_cvtps_epi32(sound, scaled);
            __m128i bytes = _mm512_cvtepi32_epi8(codes);
            sum = _mm512_add_epi32(sum, codes);
            _mm_storeu_si128((__m128i *)(out + i), bits == 8 ? bytes : _mm_shuffle_epi8(bytes, as_words));
        }
        sums[b * apart] = (float)_mm512_reduce_add_epi32(sum);
    }
#else
    (void)bits, (void)out, (void)sums, (void)apart;
#endif
    return largest / 127.0f + total(wrong);
}

/* A product with its rows made ready. */
typedef struct {
    Product p;
    long blocks, apart; /* = rows */
    float *sums;  /* [blocks][rows] of x's blocks */
    float *steps; /* [rows] of quantized rows */
    float *normed;
    int8_t *quantized; /* in the place of ``normed``'s end; 0: x stays as it is */
} Ready;

static Ready ready(const Product *p)
{
    long rows = p->rows, in = p->w->in, blocks = in / BLOCK;
    float *steps = p->scratch + rows * blocks, *normed = steps + rows;
    Ready made = {*p, blocks, rows, p->scratch, steps, normed, p->quantizes ? (int8_t *)(normed + rows * in) : 0};
    if (p->norm)
        made.p.x = normed;
    return made;
}

static void ready_row(const Ready *to, const Product *p, long r)
{
    long in = p->w->in;
    const float *x = p->x + r * in;
    float *sums = to->sums + r;
    if (p->norm) {
        norm_row(x, p->norm, p->eps, in, to->normed + r * in);
        x = to->normed + r * in;
    }
    if (p->quantizes) {
        to->steps[r] = quantized(x, in, p->w->bits, to->quantized + r * in, sums, p->rows);
        return;
    }
    for (long b = 0; b < to->blocks; b++)
        sums[b * p->rows] = total(load(x + b * BLOCK) + load(x + b * BLOCK + LANES));
}

#define FEW(bits, rows)                                                                                                \
    static __attribute__((noinline)) void product_##bits##_##rows(const Ready *to, long group, long row, vf *acc)      \
    {                                                                                                                  \
        const Matrix *w = to->p.w;                                                                                     \
        long blocks = to->blocks, at = group * blocks * LANES;                                                         \
        const uint32_t *codes = w->codes + at * bits;                                                                  \
        const uint16_t *scale = w->scale + at, *least = w->least + at;                                                 \
        const float *sums = to->sums + row;                                                                            \
        if (!to->quantized) {                                                                                          \
            product(bits, rows, blocks, codes, scale, least, to->p.x + row * w->in, w->in, sums, to->apart, acc);      \
            return;                                                                                                    \
        }                                                                                                              \
        const int8_t *x = to->quantized + row * w->in;                                                                 \
        product_of_codes(bits, rows, blocks, codes, scale, least, x, w->in, sums, to->apart, acc);                     \
        for (long r = 0; r < rows; r++)                                                                                \
            acc[r] *= to->steps[row + r];                                                                              \
    }
FEW(4, 1) FEW(4, 2) FEW(4, 4) FEW(4, 8)
FEW(8, 1) FEW(8, 2) FEW(8, 4) FEW(8, 8)

static void product_of(const Ready *to, long rows, long group, long row, vf *acc)
{
    int four = to->p.w->bits == 4;
    switch (rows) {
    case 1: (four ? product_4_1 : product_8_1)(to, group, row, acc); break;
    case 2: (four ? product_4_2 : product_8_2)(to, group, row, acc); break;
    case 4: (four ? product_4_4 : product_8_4)(to, group, row, acc); break;
    default: (four ? product_4_8 : product_8_8)(to, group, row, acc);
    }
}

static void outputs(const Ready *to, long rows, long group, long row)
{
    const Product *p = &to->p;
    long width = p->gated ? p->w->out / 2 : p->w->out;
    vf acc[8], up[8];
    product_of(to, rows, group, row, acc);
    if (p->gated)
        product_of(to, rows, group + width / LANES, row, up);
    for (long r = 0; r < rows; r++) {
        long at = (row + r) * width + group * LANES;
        if (p->gated)
            acc[r] = acc[r] / (1.0f + exp_of(-acc[r])) * up[r];
        if (p->bias)
            acc[r] += load(p->bias + group * LANES);
        if (p->residual)
            acc[r] += load(p->residual + at);
        store(p->y + at, acc[r]);
    }
}

void multiply(Worker *worker, const Product *p)
{
    Ready to = ready(p);
    EACH(r, worker, p->rows)
        ready_row(&to, p, r);
    long groups = (p->gated ? p->w->out / 2 : p->w->out) / LANES, step = groups / (8 * omp_get_num_threads());
    step = step < 1 || p->rows > MANY ? 1 : step > MOST_AT_ONCE ? MOST_AT_ONCE : step;
    for (long from; (from = next(worker, groups, step)) >= 0;)
        for (long group = from; group < from + step && group < groups; group++)
            for (long row = 0, few; row < p->rows; row += few) {
                few = p->rows - row >= 8 ? 8 : p->rows - row >= 4 ? 4 : p->rows - row >= 2 ? 2 : 1;
                outputs(&to, few, group, row);
            }
}
