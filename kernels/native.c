/* The operations of a decoder layer on a CPU, fp32: few-row products of block-quantized weights, RMSNorm, rotary
 * positions with the KV write, and paged attention that reads pages where they lie.
 *
 * Vectors are 16 floats wide in GCC's own notation; the compiler makes of them what the machine has. No fast-math: what
 * is not finite must stay so, because that is how a fault is found. Threads are those of the calling thread's OpenMP.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define BLOCK 32      /* weights that share a scale */
#define TILE_KEYS 128 /* keys between two corrections of the running maximum */
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint32_t vu_any __attribute__((vector_size(64), aligned(4), may_alias));

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf all(float x) { return x - (vf){0}; }

INLINE vf either(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

INLINE float total(vf x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return sum;
#endif
}

/* e^x within 2 ulp; NaN stays NaN, and what lies below the range becomes 0. */
INLINE vf exp_of(vf x)
{
    vf lowest = all(-87.3f), highest = all(88.7f);
    x = either(x < lowest, lowest, x); /* a comparison with NaN is false, so NaN passes */
    vf over = either(x > highest, all(INFINITY), all(0));
    x = either(x > highest, highest, x);
    vf magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number in the low bits */
    vf shifted = x * 1.44269504f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi power = ((vi)shifted << 23) + (127 << 23); /* the whole number's low bits, moved to the exponent */
    vf scaled = p * (vf)power;
    return scaled + over;
}

/* --- products ------------------------------------------------------------------------------------------------------ */

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
 * sums [ROWS][blocks] of x's blocks. */
INLINE void product(int bits, int rows, long blocks, const uint32_t *codes, const uint16_t *scale,
                    const uint16_t *least, const float *x, long x_stride, const float *sums, vf *acc)
{
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
                acc[r] += m * sums[r * blocks + b];
        }
    }
}

/* The same from activations of 8 bits: sums of whole numbers are exact, so a row's result has the same bits in every
 * step. x [ROWS][in] in the order of ``quantized``; sums of its blocks. Needs VNNI. */
INLINE void product_of_codes(int bits, int rows, long blocks, const uint32_t *codes, const uint16_t *scale,
                             const uint16_t *least, const int8_t *x, long x_stride, const float *sums, vf *acc)
{
#if defined(__AVX512VNNI__)
    for (int r = 0; r < rows; r++)
        acc[r] = all(0);
    for (long b = 0; b < blocks; b++) {
        __m512i part[8];
        for (int r = 0; r < rows; r++)
            part[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int w = 0; w < bits; w++) {
            vu word = *(const vu_any *)(codes + (b * bits + w) * LANES);
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
        for (int r = 0; r < rows; r++)
            acc[r] += d * (vf)_mm512_cvtepi32_ps(part[r]) + m * sums[r * blocks + b];
    }
#else
    (void)bits, (void)blocks, (void)codes, (void)scale, (void)least, (void)x, (void)x_stride, (void)sums;
    for (int r = 0; r < rows; r++)
        acc[r] = all(NAN); /* ew_has_codes says that this can't be */
#endif
}

int ew_has_codes(void)
{
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

/* One row to whole numbers from -127 to 127; returns its step. With 4-bit weights, each 8 are put as 0 2 4 6 1 3 5 7,
 * which is how their codes come out of a word. What is not finite makes the step so too. */
static float quantized(const float *x, long n, int bits, int8_t *out, float *sums)
{
    vf most = all(0);
    float finite = 0;
    for (long i = 0; i < n; i += LANES) {
        vf v = load(x + i);
        vf size = (vf)((vi)v & 0x7fffffff);
        most = either(size > most, size, most);
        finite += total(v * 0.0f); /* NaN when any of them is not finite */
    }
    float largest = 1e-12f;
    for (int i = 0; i < LANES; i++)
        largest = most[i] > largest ? most[i] : largest;
    float factor = 127.0f / largest;
    for (long b = 0; b < n / BLOCK; b++) {
        int sum = 0;
        for (long i = 0; i < BLOCK; i++) {
            float scaled = x[b * BLOCK + i] * factor;
            int code = scaled >= -127.5f && scaled <= 127.5f ? (int)rintf(scaled) : 0;
            long to = bits == 8 ? i : (i & ~7L) + (i & 1) * 4 + (i & 7) / 2;
            out[b * BLOCK + to] = (int8_t)code;
            sum += code;
        }
        sums[b] = (float)sum;
    }
    return largest / 127.0f + finite;
}

typedef struct {
    const float *x, *sums, *bias, *residual;
    const int8_t *quantized; /* instead of x */
    const float *steps;      /* of its rows */
    const uint32_t *codes;
    const uint16_t *scale, *least;
    float *y;
    long in, out; /* of the matrix; y has out columns, or out / 2 when gated */
    int bits, gated;
} Product;

#define FEW(bits, rows)                                                                                                \
    static __attribute__((noinline)) void product_##bits##_##rows(const Product *p, long group, long row, vf *acc)     \
    {                                                                                                                  \
        long blocks = p->in / BLOCK, at = group * blocks * LANES;                                                      \
        if (p->quantized) {                                                                                            \
            product_of_codes(bits, rows, blocks, p->codes + at * bits, p->scale + at, p->least + at,                   \
                             p->quantized + row * p->in, p->in, p->sums + row * blocks, acc);                          \
            for (long r = 0; r < rows; r++)                                                                            \
                acc[r] *= p->steps[row + r];                                                                           \
            return;                                                                                                    \
        }                                                                                                              \
        product(bits, rows, blocks, p->codes + at * bits, p->scale + at, p->least + at, p->x + row * p->in, p->in,     \
                p->sums + row * blocks, acc);                                                                          \
    }
FEW(4, 1) FEW(4, 2) FEW(4, 4) FEW(4, 8)
FEW(8, 1) FEW(8, 2) FEW(8, 4) FEW(8, 8)

static void product_of(const Product *p, long rows, long group, long row, vf *acc)
{
    int four = p->bits == 4;
    switch (rows) {
    case 1: (four ? product_4_1 : product_8_1)(p, group, row, acc); break;
    case 2: (four ? product_4_2 : product_8_2)(p, group, row, acc); break;
    case 4: (four ? product_4_4 : product_8_4)(p, group, row, acc); break;
    default: (four ? product_4_8 : product_8_8)(p, group, row, acc);
    }
}

static void outputs(const Product *p, long rows, long group, long row)
{
    vf acc[8], up[8];
    product_of(p, rows, group, row, acc);
    if (p->gated) {
        long half = p->out / 2;
        product_of(p, rows, group + half / LANES, row, up);
        for (long r = 0; r < rows; r++)
            store(p->y + (row + r) * half + group * LANES, acc[r] / (1.0f + exp_of(-acc[r])) * up[r]);
        return;
    }
    for (long r = 0; r < rows; r++) {
        long at = (row + r) * p->out + group * LANES;
        if (p->bias)
            acc[r] += load(p->bias + group * LANES);
        if (p->residual)
            acc[r] += load(p->residual + at);
        store(p->y + at, acc[r]);
    }
}

INLINE void norm_row(const float *x, const float *weight, float eps, long n, float *out)
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

/* y[m] = rms_norm(x[m]) W^T, normed only with ``norm``; plus bias, plus residual; gated: silu of the first half of the
 * outputs times the second. ``quantize``: the activations are rounded to 8 bits, a step
 * per row. scratch: 2 * rows * in floats. */
void ew_product(const float *x, long rows, long in, long out, const float *norm, float eps, int bits,
                const uint32_t *codes, const uint16_t *scale, const uint16_t *least, const float *bias,
                const float *residual, int gated, int quantize, float *scratch, float *y)
{
    long blocks = in / BLOCK;
    float *sums = scratch, *steps = sums + rows * blocks, *normed = steps + rows;
    int8_t *codes_of_x = (int8_t *)(normed + rows * in);
#pragma omp parallel for schedule(static) if (rows > 32)
    for (long r = 0; r < rows; r++) {
        const float *from = x + r * in;
        if (norm) {
            norm_row(from, norm, eps, in, normed + r * in);
            from = normed + r * in;
        }
        if (quantize) {
            steps[r] = quantized(from, in, bits, codes_of_x + r * in, sums + r * blocks);
            continue;
        }
        for (long b = 0; b < blocks; b++)
            sums[r * blocks + b] = total(load(from + b * BLOCK) + load(from + b * BLOCK + LANES));
    }
    Product p = {norm ? normed : x, sums, bias, residual, quantize ? codes_of_x : 0, steps, codes, scale, least, y, in, out, bits, gated};
    long groups = (gated ? out / 2 : out) / LANES;
#pragma omp parallel for schedule(static)
    for (long group = 0; group < groups; group++)
        for (long row = 0, few; row < rows; row += few) {
            few = rows - row >= 8 ? 8 : rows - row >= 4 ? 4 : rows - row >= 2 ? 2 : 1;
            outputs(&p, few, group, row);
        }
}

/* --- element by element --------------------------------------------------------------------------------------------- */

void ew_norm(const float *x, const float *weight, float eps, long rows, long n, float *out)
{
#pragma omp parallel for schedule(static) if (rows * n > 32768)
    for (long r = 0; r < rows; r++)
        norm_row(x + r * n, weight, eps, n, out + r * n);
}

/* both [rows, 2 n]: gate, then up -> out [rows, n]; n a multiple of 16. */
void ew_gate(const float *both, long rows, long n, float *out)
{
#pragma omp parallel for schedule(static) if (rows * n > 16384)
    for (long r = 0; r < rows; r++) {
        const float *gate = both + 2 * r * n, *up = gate + n;
        for (long i = 0; i < n; i += LANES) {
            vf g = load(gate + i);
            store(out + r * n + i, g / (1.0f + exp_of(-g)) * load(up + i));
        }
    }
}

/* --- attention ------------------------------------------------------------------------------------------------------ */

typedef struct {
    float *qkv; /* [tokens][heads + 2 kv_heads][dim] */
    float *k, *v;
    long token_stride; /* floats between two tokens of a page, and between pages page_size times that */
    long heads, kv_heads, dim, page_size;
} Layer;

INLINE void rotate(float *x, const float *cosine, const float *sine, long dim)
{
    for (long i = 0; i < dim / 2; i++) {
        float a = x[i], b = x[i + dim / 2];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + dim / 2] = b * cosine[i] + a * sine[i];
    }
}

/* Norms (where given) and rotates q and k in place, writes k and v to their slots. cosine, sine [tokens, dim / 2]. */
void ew_place(float *qkv, long tokens, long heads, long kv_heads, long dim, const float *q_norm, const float *k_norm,
              float eps, const float *cosine, const float *sine, const int64_t *slots, float *k, float *v,
              long token_stride)
{
    long width = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for schedule(static) if (tokens * width > 16384)
    for (long t = 0; t < tokens; t++) {
        float *row = qkv + t * width;
        for (long h = 0; h < heads + kv_heads; h++) {
            const float *norm = h < heads ? q_norm : k_norm;
            if (norm)
                norm_row(row + h * dim, norm, eps, dim, row + h * dim);
            rotate(row + h * dim, cosine + t * dim / 2, sine + t * dim / 2, dim);
        }
        long at = slots[t] * token_stride;
        memcpy(k + at, row + heads * dim, kv_heads * dim * sizeof(float));
        memcpy(v + at, row + (heads + kv_heads) * dim, kv_heads * dim * sizeof(float));
    }
}

/* Tokens of a request's context, found through its block table. */
typedef struct {
    const float *base;
    const int32_t *pages;
    long stride, page_size;
} Context;

INLINE const float *token(const Context *c, long t)
{
    return c->base + ((long)c->pages[t / c->page_size] * c->page_size + t % c->page_size) * c->stride;
}

INLINE float largest(const float *s, long n, float so_far)
{
    vf most = all(so_far);
    for (long t = 0; t < n; t += LANES) {
        vf x = load(s + t);
        most = either(x > most, x, most);
    }
    for (int i = 0; i < LANES; i++)
        so_far = most[i] > so_far ? most[i] : so_far;
    return so_far;
}

/* Scores s [n], n a multiple of 16, become weights relative to a new running maximum; returns by what to multiply all
 * that was summed before. */
INLINE float weigh(float *s, long n, float *most, float *sum)
{
    float now = largest(s, n, *most);
    float keep = *most == now ? 1.0f : exp_of(all(*most - now))[0];
    vf added = all(0);
    for (long t = 0; t < n; t += LANES) {
        vf p = exp_of(load(s + t) - now);
        store(s + t, p);
        added += p;
    }
    *sum = *sum * keep + total(added);
    *most = now;
    return keep;
}

/* One query token: ``group`` heads q [group][dim] that share a KV head -> out [group][dim]. */
INLINE void attend_token(int group, long dim, const float *q, const Context *k, const Context *v, long length,
                         float scale, float *out)
{
    float s[4][TILE_KEYS], most[4], sum[4];
    vf acc[4][16];
    for (int g = 0; g < group; g++) {
        most[g] = -INFINITY;
        sum[g] = 0;
        for (long c = 0; c < dim / LANES; c++)
            acc[g][c] = all(0);
    }
    for (long start = 0; start < length; start += TILE_KEYS) {
        long n = length - start < TILE_KEYS ? length - start : TILE_KEYS, padded = (n + LANES - 1) / LANES * LANES;
        for (long t = 0; t < n; t++) {
            const float *key = token(k, start + t);
            for (int g = 0; g < group; g++) {
                vf dot = all(0);
                for (long c = 0; c < dim / LANES; c++)
                    dot += load(q + g * dim + c * LANES) * load(key + c * LANES);
                s[g][t] = total(dot) * scale;
            }
        }
        for (int g = 0; g < group; g++) {
            for (long t = n; t < padded; t++)
                s[g][t] = -INFINITY;
            float keep = weigh(s[g], padded, &most[g], &sum[g]);
            if (keep != 1.0f)
                for (long c = 0; c < dim / LANES; c++)
                    acc[g][c] *= keep;
        }
        for (long t = 0; t < n; t++) {
            const float *value = token(v, start + t);
            for (long c = 0; c < dim / LANES; c++) {
                vf x = load(value + c * LANES);
                for (int g = 0; g < group; g++)
                    acc[g][c] += s[g][t] * x;
            }
        }
    }
    for (int g = 0; g < group; g++)
        for (long c = 0; c < dim / LANES; c++)
            store(out + g * dim + c * LANES, acc[g][c] / sum[g]);
}

INLINE void attend_heads(long group, long dim, const float *q, const Context *k, const Context *v, long length,
                         float scale, float *out)
{
    long g = 0;
    for (; g + 4 <= group; g += 4)
        attend_token(4, dim, q + g * dim, k, v, length, scale, out + g * dim);
    switch (group - g) {
    case 1: attend_token(1, dim, q + g * dim, k, v, length, scale, out + g * dim); break;
    case 2: attend_token(2, dim, q + g * dim, k, v, length, scale, out + g * dim); break;
    case 3: attend_token(3, dim, q + g * dim, k, v, length, scale, out + g * dim); break;
    }
}

/* Several new tokens of one request, in blocks of at most ROWS rows (a token's heads that share a KV head are as many
 * rows). Keys are transposed first: [kv_heads][tiles of 16 keys][dim][16]. */
#define ROWS 24

INLINE void scores(const float *q, long rows, const float *keys, long tiles, long dim, float *s)
{
    for (long r = 0; r < rows; r += 8)
        for (long tile = 0; tile < tiles; tile += 2) {
            vf acc[8][2];
            const float *left = keys + tile * dim * LANES, *right = left + (tile + 1 < tiles ? dim * LANES : 0);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                acc[i][0] = acc[i][1] = all(0);
            for (long d = 0; d < dim; d++) {
                vf a = load(left + d * LANES), b = load(right + d * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    float x = q[(r + i) * dim + d];
                    acc[i][0] += a * x;
                    acc[i][1] += b * x;
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                store(s + (r + i) * TILE_KEYS + tile * LANES, acc[i][0]);
                if (tile + 1 < tiles)
                    store(s + (r + i) * TILE_KEYS + (tile + 1) * LANES, acc[i][1]);
            }
        }
}

/* out [6][dim] += s [6][n] values; ``wide`` vectors of dim at a time. */
INLINE void mix(int wide, const float *s, const Context *v, long start, long n, long dim, long at, float *out)
{
    vf acc[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++)
        for (int c = 0; c < wide; c++)
            acc[i][c] = load(out + i * dim + at + c * LANES);
    for (long t = 0; t < n; t++) {
        const float *value = token(v, start + t) + at;
        vf x[4];
        for (int c = 0; c < wide; c++)
            x[c] = load(value + c * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) {
            float p = s[i * TILE_KEYS + t];
            for (int c = 0; c < wide; c++)
                acc[i][c] += x[c] * p;
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++)
        for (int c = 0; c < wide; c++)
            store(out + i * dim + at + c * LANES, acc[i][c]);
}

/* ``count`` query tokens from position ``first`` on; q points at the first one's first head of this group. */
static void attend_block(const Layer *layer, const float *q, long q_stride, long count, long first, const float *keys,
                         const Context *v, float scale, float *out, long out_stride)
{
    long dim = layer->dim, group = layer->heads / layer->kv_heads, rows = count * group;
    float own[ROWS * 256], sums[ROWS * 256], s[ROWS * TILE_KEYS], most[ROWS], sum[ROWS];
    memset(own, 0, sizeof(float) * ROWS * dim);
    memset(sums, 0, sizeof(float) * ROWS * dim);
    for (long r = 0; r < rows; r++) {
        const float *from = q + r / group * q_stride + r % group * dim;
        for (long d = 0; d < dim; d++)
            own[r * dim + d] = from[d] * scale;
    }
    for (long r = 0; r < ROWS; r++) {
        most[r] = -INFINITY;
        sum[r] = 0;
    }
    long length = first + count;
    for (long start = 0; start < length; start += TILE_KEYS) {
        long n = length - start < TILE_KEYS ? length - start : TILE_KEYS, tiles = (n + LANES - 1) / LANES;
        scores(own, rows, keys + start * dim, tiles, dim, s);
        for (long r = 0; r < rows; r++) {
            long seen = first + r / group + 1 - start; /* keys of this tile that the row may look at */
            for (long t = seen < 0 ? 0 : seen; t < tiles * LANES; t++)
                s[r * TILE_KEYS + t] = -INFINITY;
            float keep = 1.0f;
            if (seen > 0)
                keep = weigh(s + r * TILE_KEYS, tiles * LANES, &most[r], &sum[r]);
            else
                memset(s + r * TILE_KEYS, 0, sizeof(float) * tiles * LANES);
            if (keep != 1.0f)
                for (long d = 0; d < dim; d += LANES)
                    store(sums + r * dim + d, load(sums + r * dim + d) * keep);
        }
        for (long r = rows; r < (rows + 5) / 6 * 6; r++)
            memset(s + r * TILE_KEYS, 0, sizeof(float) * tiles * LANES);
        for (long r = 0; r < rows; r += 6) {
            long d = 0;
            for (; d + 4 * LANES <= dim; d += 4 * LANES)
                mix(4, s + r * TILE_KEYS, v, start, n, dim, d, sums + r * dim);
            for (; d < dim; d += LANES)
                mix(1, s + r * TILE_KEYS, v, start, n, dim, d, sums + r * dim);
        }
    }
    for (long r = 0; r < rows; r++)
        for (long d = 0; d < dim; d += LANES)
            store(out + r / group * out_stride + r % group * dim + d, load(sums + r * dim + d) / sum[r]);
}

static void transpose_tile(const Context *k, long start, long length, long dim, float *out)
{
    for (long t = 0; t < LANES; t++) {
        if (start + t >= length) { /* scores of these are never used, but must not be NaN times anything */
            for (long d = 0; d < dim; d++)
                out[d * LANES + t] = 0;
            continue;
        }
        const float *key = token(k, start + t);
        for (long d = 0; d < dim; d++)
            out[d * LANES + t] = key[d];
    }
}

/* Causal attention of packed tokens, whose keys and values are in their pages already. begin [requests + 1], kv_len
 * [requests], table [requests, table_width]; keys: room for the longest context of a request with several new tokens,
 * rounded up to 16, times kv_heads * dim. out [tokens, heads * dim]. dim: a multiple of 16 up to 256. */
void ew_attend(const float *qkv, long heads, long kv_heads, long dim, const float *k, const float *v,
               long token_stride, long page_size, long requests, const int32_t *begin, const int32_t *kv_len,
               const int32_t *table, long table_width, float scale, float *keys, float *out)
{
    long width = (heads + 2 * kv_heads) * dim, group = heads / kv_heads;
    Layer layer = {0, 0, 0, token_stride, heads, kv_heads, dim, page_size};
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (long request = 0; request < requests; request++)
        for (long head = 0; head < kv_heads; head++) {
            long t = begin[request];
            if (begin[request + 1] - t != 1)
                continue;
            const int32_t *pages = table + request * table_width;
            Context ks = {k + head * dim, pages, token_stride, page_size};
            Context vs = {v + head * dim, pages, token_stride, page_size};
            const float *q = qkv + t * width + head * group * dim;
            float *to = out + t * heads * dim + head * group * dim;
            if (dim == 64)
                attend_heads(group, 64, q, &ks, &vs, kv_len[request], scale, to);
            else if (dim == 128)
                attend_heads(group, 128, q, &ks, &vs, kv_len[request], scale, to);
            else
                attend_heads(group, dim, q, &ks, &vs, kv_len[request], scale, to);
        }
    for (long request = 0; request < requests; request++) {
        long t = begin[request], count = begin[request + 1] - t, length = kv_len[request];
        if (count < 2)
            continue;
        const int32_t *pages = table + request * table_width;
        long tiles = (length + LANES - 1) / LANES, step = ROWS / group > 0 ? ROWS / group : 1;
        long blocks = (count + step - 1) / step;
#pragma omp parallel
        {
#pragma omp for schedule(static) collapse(2)
            for (long head = 0; head < kv_heads; head++)
                for (long tile = 0; tile < tiles; tile++) {
                    Context ks = {k + head * dim, pages, token_stride, page_size};
                    transpose_tile(&ks, tile * LANES, length, dim, keys + (head * tiles + tile) * dim * LANES);
                }
#pragma omp for schedule(dynamic, 1) collapse(2)
            for (long block = 0; block < blocks; block++)
                for (long head = 0; head < kv_heads; head++) {
                    long from = (blocks - 1 - block) * step; /* the longest first */
                    long n = count - from < step ? count - from : step;
                    Context vs = {v + head * dim, pages, token_stride, page_size};
                    attend_block(&layer, qkv + (t + from) * width + head * group * dim, width, n,
                                 length - count + from, keys + head * tiles * LANES * dim, &vs, scale,
                                 out + (t + from) * heads * dim + head * group * dim, heads * dim);
                }
        }
    }
}
