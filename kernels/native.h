/* What the kernels of a CPU share: vectors, teams of threads, and what Python hands over (``native_structs.py`` has the
 * same structures).
 *
 * Vectors are 16 floats wide in GCC's own notation; the compiler makes of them what the machine has. No fast-math: what
 * is not finite must stay so, because that is how a fault is found.
 */
#pragma once
#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define BLOCK 32 /* weights that share a scale */
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

/* e^x within 2 ulp; NaN stays NaN, what lies below the range becomes 1.2e-38, and from 88.4 on infinity. */
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

/* --- teams -------------------------------------------------------------------------------------------------------- */

/* The threads of one parallel region, which go from stage to stage. A stage consists of pieces, and is over when each
 * is done, by whomever: a thread whose core is taken away, or that comes late, holds up the others by the piece in its
 * hands at most, and finds afterwards that they went on. */
typedef struct {
    _Alignas(64) atomic_ulong front; /* number of the stage << 32 | first piece that is nobody's */
    _Alignas(64) atomic_long done;   /* pieces of this stage */
    atomic_int sleepers;
    pthread_mutex_t lock;
    pthread_cond_t moved;
} Team;

typedef struct {
    Team *team;
    unsigned long stage; /* it is in */
    long held;           /* pieces in its hands */
} Worker;

void form(Team *team);
void disband(Team *team);

/* The first of up to ``step`` of the stage's ``total`` pieces (at least one), those claimed before being done. -1: the
 * stage is over, what was written in it can be read, and the caller is in the next one. */
long next(Worker *worker, long total, long step);

#define EACH(i, worker, total) for (long i; (i = next(worker, total, 1)) >= 0;)

/* --- products ----------------------------------------------------------------------------------------------------- */

/* Blocks of BLOCK codes: [out / 16][in / 32][bits][16] words of 32 / bits codes; scale, least [out / 16][in / 32][16]
 * fp16; least 0 with 8 bits. */
typedef struct {
    const uint32_t *codes;
    const uint16_t *scale, *least;
    long in, out;
    int bits;
} Matrix;

/* y[m] = rms_norm(x[m]) W^T, normed only with ``norm``; plus bias, plus residual (which y may be); gated: silu of the
 * first half of the outputs times the second, so that y has half the columns. ``quantizes``: activations are rounded to
 * 8 bits, a step per row. scratch: 2 * rows * in floats. */
typedef struct {
    const Matrix *w;
    const float *x, *norm, *bias, *residual;
    float *y, *scratch;
    long rows;
    float eps;
    int gated, quantizes;
} Product;

void multiply(Worker *worker, const Product *p);
void norm_row(const float *x, const float *weight, float eps, long n, float *out);

/* --- attention ---------------------------------------------------------------------------------------------------- */

typedef struct {
    long heads, kv_heads, dim, page_size;
    long token_stride; /* floats between two tokens of a page, and between pages page_size times that */
    float eps, scale;
} Shape;

/* Where a step's tokens sit, which lie request by request. */
typedef struct {
    long tokens, requests, table_width;
    const int32_t *begin;        /* [requests + 1] */
    const int32_t *kv_len;       /* [requests], with the new tokens */
    const int32_t *table;        /* [requests][table_width] */
    const int32_t *positions;    /* [tokens] */
    const int64_t *slots;        /* [tokens] */
    const int32_t *splits;       /* [requests + 1]: before each, how many splits requests with one new token have */
    const float *cosine, *sine;  /* [max_position][dim / 2] */
    float *keys;                 /* the longest context of a request with several new tokens, rounded up to 16 */
    float *partials;             /* [splits][heads][dim + 2] */
} Plan;

/* Norms (where given) and rotates q and k of qkv [tokens][heads + 2 kv_heads][dim] in place, writes k and v to their
 * slots. */
void place(Worker *worker, const Shape *shape, const Plan *plan, const float *q_norm, const float *k_norm, float *qkv,
           float *k, float *v);

/* Causal attention of tokens whose keys and values are in their pages already -> out [tokens][heads][dim]. dim: a
 * multiple of 16 up to 256. */
void attend(Worker *worker, const Shape *shape, const Plan *plan, const float *qkv, const float *k, const float *v,
            float *out);
