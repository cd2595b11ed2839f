/* Rotary positions with the KV write, and paged attention that reads pages where they lie. */
#include "native.h"

#define TILE_KEYS 128 /* keys between two corrections of the running maximum */
#define SPLIT 64      /* keys that one piece of a single token's work attends to */

INLINE void rotate(float *x, const float *cosine, const float *sine, long dim)
{
    for (long i = 0; i < dim / 2; i++) {
        float a = x[i], b = x[i + dim / 2];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + dim / 2] = b * cosine[i] + a * sine[i];
    }
}

void place(Worker *worker, const Shape *shape, const Plan *plan, const float *q_norm, const float *k_norm, float *qkv,
           float *k, float *v)
{
    long heads = shape->heads, kv_heads = shape->kv_heads, dim = shape->dim;
    EACH(t, worker, plan->tokens) {
        float *row = qkv + t * (heads + 2 * kv_heads) * dim;
        long angle = plan->positions[t] * (dim / 2);
        for (long h = 0; h < heads + kv_heads; h++) {
            const float *norm = h < heads ? q_norm : k_norm;
            if (norm)
                norm_row(row + h * dim, norm, shape->eps, dim, row + h * dim);
            rotate(row + h * dim, plan->cosine + angle, plan->sine + angle, dim);
        }
        long at = plan->slots[t] * shape->token_stride;
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

/* --- one new token ------------------------------------------------------------------------------------------------ */

/* A stretch of a context: where its tokens lie, in floats from the first one's key or value of a page's first head. */
typedef struct {
    const float *k, *v;
    long at[SPLIT], n;
} Stretch;

static void find(const Context *k, const Context *v, long start, long n, Stretch *found)
{
    long page = start / k->page_size, inside = start % k->page_size;
    found->k = k->base, found->v = v->base, found->n = n;
    for (long t = 0; t < n; t++) {
        found->at[t] = ((long)k->pages[page] * k->page_size + inside) * k->stride;
        if (++inside == k->page_size)
            page++, inside = 0;
    }
    for (long t = n; t < SPLIT; t++) /* what lies behind the end is computed with, and not used */
        found->at[t] = found->at[n - 1];
}

#if defined(__AVX512F__)
typedef struct {
    vi low, high;
} Halves;

static const Halves BY_ONE = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                              {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}};
static const Halves BY_TWO = {{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                              {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}};
static const Halves BY_FOUR = {{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                               {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}};
static const Halves BY_EIGHT = {{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
                                {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}};

/* Neighbouring lanes of a and b are added; a's sums lie before b's in each stretch of lanes. */
INLINE vf fold(vf a, vf b, Halves by) { return __builtin_shuffle(a, b, by.low) + __builtin_shuffle(a, b, by.high); }
#endif

/* ``group`` query heads q [group][dim] against LANES keys of a stretch -> s [group][SPLIT]. Keys and values at ``soon``
 * are called for meanwhile: the machine's own guess does not see how they lie. */
INLINE void score(int group, long dim, const float *q, const Stretch *from, long tile, long head, const Stretch *then,
                  long soon, float scale, float *s)
{
    const float *base = from->k + head * dim;
    vf quads[4][4];
#pragma GCC unroll 1
    for (int quad = 0; quad < 4; quad++) {
        vf dots[4][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const float *key = base + from->at[tile + quad * 4 + i];
            if (then) {
                long next = then->at[soon + quad * 4 + i] + head * dim;
                for (long c = 0; c < dim; c += LANES) {
                    __builtin_prefetch(then->k + next + c, 0, 2);
                    __builtin_prefetch(then->v + next + c, 0, 2);
                }
            }
            for (int g = 0; g < group; g++)
                dots[g][i] = all(0);
            for (long c = 0; c < dim; c += LANES) {
                vf x = load(key + c);
                for (int g = 0; g < group; g++)
                    dots[g][i] += x * load(q + g * dim + c);
            }
        }
        for (int g = 0; g < group; g++)
#if defined(__AVX512F__)
            quads[g][quad] = fold(fold(dots[g][0], dots[g][1], BY_ONE), fold(dots[g][2], dots[g][3], BY_ONE), BY_TWO);
    }
    for (int g = 0; g < group; g++) {
        vf a = fold(quads[g][0], quads[g][1], BY_FOUR), b = fold(quads[g][2], quads[g][3], BY_FOUR);
        store(s + g * SPLIT + tile, fold(a, b, BY_EIGHT) * scale);
    }
#else
            for (int i = 0; i < 4; i++)
                s[g * SPLIT + tile + quad * 4 + i] = total(dots[g][i]) * scale;
    }
    (void)quads;
#endif
}

/* out [group][dim] = s [group][SPLIT] times values. */
INLINE void blend(int group, long dim, const float *s, const Stretch *from, long head, float *out)
{
    const float *base = from->v + head * dim;
    vf acc[4][16];
    for (int g = 0; g < group; g++)
        for (long c = 0; c < dim / LANES; c++)
            acc[g][c] = all(0);
    for (long t = 0; t < from->n; t++)
        for (long c = 0; c < dim / LANES; c++) {
            vf x = load(base + from->at[t] + c * LANES);
            for (int g = 0; g < group; g++)
                acc[g][c] += s[g * SPLIT + t] * x;
        }
    for (int g = 0; g < group; g++)
        for (long c = 0; c < dim / LANES; c++)
            store(out + g * dim + c * LANES, acc[g][c]);
}

/* What a softmax needs of all heads of one token over a stretch: partial [heads][dim] values weighted by
 * e^(score - most), [heads] sums of those weights, [heads] most. ``then``: the stretch that comes next, or 0. */
INLINE void attend_stretch(const Shape *shape, long dim, long group, const float *q, const Stretch *from,
                           const Stretch *then, float *partial)
{
    long heads = shape->heads, padded = (from->n + LANES - 1) / LANES * LANES;
    float s[heads * SPLIT], *weight = partial + heads * dim, *most = weight + heads;
#define BY_FOURS(call)                                                                                                 \
    for (long head = 0; head < shape->kv_heads; head++)                                                                \
        for (long left = group, g = head * group; left > 0; left -= 4, g += 4)                                         \
            switch (left) {                                                                                            \
            case 1: call(1); break;                                                                                    \
            case 2: call(2); break;                                                                                    \
            case 3: call(3); break;                                                                                    \
            default: call(4);                                                                                          \
            }
    for (long tile = 0; tile < padded; tile += LANES) {
        int ends = tile + LANES >= padded;
#define SCORE(few)                                                                                                     \
    score(few, dim, q + g * dim, from, tile, head, ends ? then : from, ends ? 0 : tile + LANES, shape->scale,          \
          s + g * SPLIT)
        BY_FOURS(SCORE)
    }
    for (long g = 0; g < heads; g++) {
        for (long t = from->n; t < padded; t++)
            s[g * SPLIT + t] = -INFINITY;
        most[g] = -INFINITY;
        weight[g] = 0;
        weigh(s + g * SPLIT, padded, most + g, weight + g);
    }
#define BLEND(few) blend(few, dim, s + g * SPLIT, from, head, partial + g * dim)
    BY_FOURS(BLEND)
#undef BLEND
#undef SCORE
#undef BY_FOURS
}

/* One head of ``count`` partials that lie ``apart`` -> out [dim]. */
static void combine(const Shape *shape, const float *partials, long apart, long count, long head, float *out)
{
    long dim = shape->dim, heads = shape->heads;
    const float *weights = partials + heads * dim + head, *mosts = weights + heads;
    float most = -INFINITY, sum = 0;
    for (long i = 0; i < count; i++)
        most = mosts[i * apart] > most ? mosts[i * apart] : most;
    vf acc[16];
    for (long c = 0; c < dim / LANES; c++)
        acc[c] = all(0);
    for (long i = 0; i < count; i++) {
        float keep = exp_of(all(mosts[i * apart] - most))[0];
        sum += weights[i * apart] * keep;
        for (long c = 0; c < dim / LANES; c++)
            acc[c] += load(partials + i * apart + head * dim + c * LANES) * keep;
    }
    for (long c = 0; c < dim / LANES; c++)
        store(out + c * LANES, acc[c] / sum);
}

static void attend_stretches(const Shape *shape, const float *q, const Context *k, const Context *v, long length,
                             long from, long to, float *partials, long apart)
{
    Stretch found[2];
    long dim = shape->dim, group = shape->heads / shape->kv_heads;
    for (long i = from; i <= to; i++) {
        if (i < to) {
            long left = length - i * SPLIT;
            find(k, v, i * SPLIT, left < SPLIT ? left : SPLIT, &found[i & 1]);
        }
        if (i == from)
            continue;
        const Stretch *now = &found[(i - 1) & 1], *then = i < to ? &found[i & 1] : 0;
        float *partial = partials + (i - 1) * apart;
        if (dim == 64 && group == 3)
            attend_stretch(shape, 64, 3, q, now, then, partial);
        else if (dim == 64)
            attend_stretch(shape, 64, group, q, now, then, partial);
        else if (dim == 128)
            attend_stretch(shape, 128, group, q, now, then, partial);
        else
            attend_stretch(shape, dim, group, q, now, then, partial);
    }
}

static void attend_singles(Worker *worker, const Shape *shape, const Plan *plan, const float *qkv, const float *k,
                           const float *v, float *out)
{
    long heads = shape->heads, dim = shape->dim, width = (heads + 2 * shape->kv_heads) * dim, room = heads * (dim + 2);
    long items = plan->splits[plan->requests], step = items / (4 * omp_get_num_threads()), request = 0;
    step = step < 1 ? 1 : step;
    for (long item; (item = next(worker, items, step)) >= 0;)
        for (long end = item + step < items ? item + step : items; item < end;) {
            while (item >= plan->splits[request + 1])
                request++;
            long first = plan->splits[request], until = plan->splits[request + 1];
            until = until < end ? until : end;
            const int32_t *pages = plan->table + request * plan->table_width;
            Context ks = {k, pages, shape->token_stride, shape->page_size};
            Context vs = {v, pages, shape->token_stride, shape->page_size};
            attend_stretches(shape, qkv + plan->begin[request] * width, &ks, &vs, plan->kv_len[request], item - first,
                             until - first, plan->partials + first * room, room);
            item = until;
        }
    EACH(r, worker, plan->requests) {
        long first = plan->splits[r], count = plan->splits[r + 1] - first;
        for (long head = 0; count && head < heads; head++)
            combine(shape, plan->partials + first * room, room, count, head,
                    out + (plan->begin[r] * heads + head) * dim);
    }
}

/* --- several new tokens ------------------------------------------------------------------------------------------- */

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
static void attend_block(const Shape *shape, const float *q, long q_stride, long count, long first, const float *keys,
                         const Context *v, float scale, float *out, long out_stride)
{
    long dim = shape->dim, group = shape->heads / shape->kv_heads, rows = count * group;
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

static void attend_several(Worker *worker, const Shape *shape, const Plan *plan, long request, const float *qkv,
                           const float *k, const float *v, float *out)
{
    long heads = shape->heads, kv_heads = shape->kv_heads, dim = shape->dim, group = heads / kv_heads;
    long t = plan->begin[request], count = plan->begin[request + 1] - t, length = plan->kv_len[request];
    long width = (heads + 2 * kv_heads) * dim, tiles = (length + LANES - 1) / LANES;
    long step = ROWS / group > 0 ? ROWS / group : 1, blocks = (count + step - 1) / step;
    const int32_t *pages = plan->table + request * plan->table_width;
    EACH(i, worker, kv_heads * tiles) {
        Context ks = {k + i / tiles * dim, pages, shape->token_stride, shape->page_size};
        transpose_tile(&ks, i % tiles * LANES, length, dim, plan->keys + i * dim * LANES);
    }
    EACH(i, worker, blocks * kv_heads) {
        long head = i % kv_heads, from = (blocks - 1 - i / kv_heads) * step; /* the longest first */
        Context vs = {v + head * dim, pages, shape->token_stride, shape->page_size};
        attend_block(shape, qkv + (t + from) * width + head * group * dim, width,
                     count - from < step ? count - from : step, length - count + from,
                     plan->keys + head * tiles * LANES * dim, &vs, shape->scale,
                     out + (t + from) * heads * dim + head * group * dim, heads * dim);
    }
}

void attend(Worker *worker, const Shape *shape, const Plan *plan, const float *qkv, const float *k, const float *v,
            float *out)
{
    if (plan->splits[plan->requests])
        attend_singles(worker, shape, plan, qkv, k, v, out);
    for (long request = 0; request < plan->requests; request++)
        if (plan->begin[request + 1] - plan->begin[request] > 1)
            attend_several(worker, shape, plan, request, qkv, k, v, out);
}
