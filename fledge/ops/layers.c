/* Decoder layers for a few rows on a CPU, in float32. The callers are fledge/ops/compiled.py
 * and fledge/drafts/compiled_layers.py.
 *
 * A few rows take as long as the weights are read, so all operations of all layers are one call: the threads start once,
 * and read each weight once. Weights have 32 or 16 bits; sums are in float32. Each sum has one order, whatever the number
 * of rows and threads: a row's result does not depend on the other rows, bit by bit.
 *
 *   M rows   Q queries   B sequences   S = Q / B   E width   H query heads   G key heads   d head   J new slots
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define LANES 8
#define PANEL 16 /* outputs of a weight that are next to each other in memory, for each input */
#define AHEAD 4096 /* bytes: so far before they are needed, weights are asked of the memory */
#define MOST 6 /* rows for whose sums of a panel the registers of AVX2 have room */
#define BLOCK 32 /* slots that a query attends to at a time */

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4)));

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const void *data; /* [outputs / PANEL, inputs, PANEL] */
    const float *bias; /* [outputs]; NULL for none */
    int64_t outputs, inputs, kind;
} Weight;

typedef struct {
    const float *input_norm, *q_norm, *k_norm, *post_norm; /* all but the last may be NULL */
    Weight qkv, out, gate_up, down;
    int64_t window; /* 0 for none */
} Layer;

typedef struct {
    int64_t heads, kv_heads, head_dim, width, inner; /* inner: of the MLP */
    float eps, scale;
} Shape;

typedef struct {
    int64_t rows, queries, sequences, slots, new_slots, angles, rotated, threads;
    float *cache; /* [layers, keys and values, G, slots, d] */
    const int64_t *slot; /* [M] */
    const int64_t *asked; /* [Q]: the rows that are the last layer's queries, of one chain where there are more layers;
                             a row may be asked for more than once; NULL: all rows */
    const int64_t *start, *length; /* [B] */
    const int64_t *last; /* [Q]: query q sees the new slots up to this one; NULL if there is a mask */
    const uint8_t *mask; /* [Q, J] */
    const int64_t *position; /* [Q], for windows */
    const float *cosine, *sine; /* [angles, rotated]: of M / angles consecutive rows each */
    const float *first; /* [M, inputs of the first projection], if it reads something else than the norm of x */
    const int64_t *token; /* [M]: the first projection reads [norm of the token's embedding ; norm of x], [M, 2 E] */
    const float *embedding, *token_gain, *state_gain; /* [V, E], and the gains of those norms */
    int64_t normed_residual; /* the residual is that norm of x */
    const float *final_norm; /* NULL for none */
    float *x; /* [M, E], which changes */
    float *out; /* [Q, E]; x itself without `asked` */
    float *normed; /* [Q, E], with a final norm */
    float *aux; /* [M, aux_layers, E]: x before these layers */
    const int64_t *aux_layer;
    int64_t aux_layers;
} Pass;

static inline vf half_at(const uint16_t *p) {
#if defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf out;
    for (int i = 0; i < LANES; i++) {
        uint32_t h = p[i], sign = (h & 0x8000u) << 16;
        union { uint32_t u; float f; } x = {(h & 0x7fffu) << 13};
        x.f *= 0x1p112f; /* the exponents' difference; exact, also of float16's subnormal numbers */
        x.u |= sign | ((h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0); /* infinite, or NaN */
        out[i] = x.f;
    }
    return out;
#endif
}

static inline vf bfloat_at(const uint16_t *p) {
#if defined(__AVX2__) /* GCC 12 makes more instructions of __builtin_convertvector */
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16);
#endif
}

static inline float sum_of(vf v) {
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
}

/* Eight of the weights of input i in a panel. */
static inline __attribute__((always_inline)) vf weights_at(const char *panel, int kind, int64_t i, int v) {
    int64_t at = i * PANEL + v * LANES;
    if (kind == FLOAT32) return *(const vf *)((const float *)panel + at);
    if (kind == FLOAT16) return half_at((const uint16_t *)panel + at);
    return bfloat_at((const uint16_t *)panel + at);
}

/* The products of one or two panels with rows of x, [panels, rows, PANEL]. x is [rows, inputs]. */
static inline __attribute__((always_inline)) void panels_of(
    const char *const *panel, int kind, int64_t inputs, const float *x, const int panels, const int rows, float *out
) {
    vf sum[2][MOST][2];
    const float *row[MOST];
#pragma GCC unroll 6
    for (int m = 0; m < rows; m++) row[m] = x + m * inputs;
#pragma GCC unroll 2
    for (int n = 0; n < panels; n++)
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++) sum[n][m][0] = sum[n][m][1] = (vf){0};
#pragma GCC unroll 4
    for (int64_t i = 0; i < inputs; i++) {
#pragma GCC unroll 2
        for (int n = 0; n < panels; n++) {
            __builtin_prefetch(panel[n] + i * PANEL * (kind == FLOAT32 ? 4 : 2) + AHEAD);
            vf one = weights_at(panel[n], kind, i, 0), two = weights_at(panel[n], kind, i, 1);
#pragma GCC unroll 6
            for (int m = 0; m < rows; m++) sum[n][m][0] += one * row[m][i], sum[n][m][1] += two * row[m][i];
        }
    }
#pragma GCC unroll 2
    for (int n = 0; n < panels; n++)
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) *(vf *)(out + (n * rows + m) * PANEL + v * LANES) = sum[n][m][v];
}

/* Two panels at a time where the registers have room for their sums. */
static inline __attribute__((always_inline)) void of_kind(
    const char *const *panel, int kind, int64_t inputs, const float *x, int panels, int rows, float *out
) {
#define ONE(m) case m: panels_of(panel, kind, inputs, x, 1, m, out); break;
#define TWO(m) case m: panels_of(panel, kind, inputs, x, 2, m, out); break;
    if (panels == 2) switch (rows) { TWO(1) TWO(2) }
    else switch (rows) { ONE(1) ONE(2) ONE(3) ONE(4) ONE(5) ONE(6) }
}

static const char *panel_at(const Weight *w, int64_t panel) {
    return (const char *)w->data + panel * PANEL * w->inputs * (w->kind == FLOAT32 ? 4 : 2);
}

static void dots(const Weight *w, const char *const *panel, int panels, const float *x, int rows, float *out) {
    if (panels == 2 && rows > 2) {
        dots(w, panel, 1, x, rows, out);
        dots(w, panel + 1, 1, x, rows, out + rows * PANEL);
    } else if (w->kind == FLOAT32) of_kind(panel, FLOAT32, w->inputs, x, panels, rows, out);
    else if (w->kind == BFLOAT16) of_kind(panel, BFLOAT16, w->inputs, x, panels, rows, out);
    else of_kind(panel, FLOAT16, w->inputs, x, panels, rows, out);
}

static void share_of(int64_t count, int64_t *first, int64_t *end) {
    int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    *first = count * thread / threads;
    *end = count * (thread + 1) / threads;
}

/* Rows are taken in equal blocks of at most MOST. */
static int64_t block_of(int64_t rows) {
    int64_t blocks = (rows + MOST - 1) / MOST;
    return (rows + blocks - 1) / blocks;
}

/* The outputs of a panel, y = found + b, or y += found + b. */
static inline void write_panel(const Weight *w, int64_t panel, const float *found, int add, float *y) {
    int64_t o = panel * PANEL, count = w->outputs - o < PANEL ? w->outputs - o : PANEL;
    if (count == PANEL && !w->bias)
        for (int v = 0; v < PANEL; v += LANES) {
            vf *at = (vf *)(y + o + v), one = *(const vf *)(found + v);
            *at = add ? *at + one : one;
        }
    else
        for (int64_t c = 0; c < count; c++) {
            float value = w->bias ? found[c] + w->bias[o + c] : found[c];
            y[o + c] = add ? y[o + c] + value : value;
        }
}

/* The thread's share of x W' + b, or of y + x W' + b. */
static void product(const Weight *w, const float *x, int64_t rows, float *y, int add) {
    int64_t first, end, block = block_of(rows);
    share_of((w->outputs + PANEL - 1) / PANEL, &first, &end);
    for (int64_t p = first; p < end; p += 2) {
        const char *panel[2] = {panel_at(w, p), panel_at(w, p + 1)};
        int panels = end - p < 2 ? 1 : 2;
        for (int64_t m = 0; m < rows; m += block) {
            int some = rows - m < block ? rows - m : block;
            float out[2 * MOST * PANEL];
            dots(w, panel, panels, x + m * w->inputs, some, out);
            for (int n = 0; n < panels; n++)
                for (int k = 0; k < some; k++)
                    write_panel(w, p + n, out + (n * some + k) * PANEL, add, y + (m + k) * w->outputs);
        }
    }
}

static inline vf between(vf x, float low, float high) {
    vf least = (vf){0} + low, most = (vf){0} + high;
    vi below = x < least, above = x > most; /* neither for NaN */
    return (vf)(((vi)x & ~below & ~above) | ((vi)least & below) | ((vi)most & above));
}

/* exp as 2^n (1 + ..), by the polynomial of Cephes' expf; within 2 units of the last place. NaN of NaN. */
static inline vf exp_of(vf x) {
    x = between(x, -87.0f, 88.0f);
    vf n = x * 1.44269504f + 12582912.0f; /* so large that its last bit is 1: it rounds */
    vf power = (vf)(((vi)n + 127) << 23);
    n -= 12582912.0f;
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = (vf){0} + 1.9875691500e-4f;
    p = p * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    return (p * x * x + x + 1.0f) * power;
}

static inline float exp_one(float x) { return exp_of((vf){0} + x)[0]; }

/* The thread's share of silu(gate) * up. The weight has the panels of the gate first. */
static void swiglu(const Weight *w, const float *x, int64_t rows, float *y) {
    int64_t first, end, inner = w->outputs / 2, half = (inner + PANEL - 1) / PANEL, block = block_of(rows);
    share_of(half, &first, &end);
    for (int64_t p = first; p < end; p++) {
        const char *panel[2] = {panel_at(w, p), panel_at(w, half + p)};
        int64_t o = p * PANEL, count = inner - o < PANEL ? inner - o : PANEL;
        for (int64_t m = 0; m < rows; m += block) {
            int some = rows - m < block ? rows - m : block;
            float out[2 * MOST * PANEL];
            dots(w, panel, 2, x + m * w->inputs, some, out);
            for (int k = 0; k < some; k++) {
                float *gate = out + k * PANEL, *up = gate + some * PANEL;
                for (int64_t c = 0; w->bias && c < count; c++) gate[c] += w->bias[o + c], up[c] += w->bias[inner + o + c];
                for (int v = 0; v < PANEL; v += LANES) {
                    vf *g = (vf *)(gate + v), minus = (vf){0} - *g;
                    *g = *g / (1.0f + exp_of(minus)) * *(vf *)(up + v);
                }
                memcpy(y + (m + k) * inner + o, gate, count * sizeof(float));
            }
        }
    }
}

static void norm(const float *x, const float *gain, int64_t width, float eps, float *y) {
    vf sum = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vf at = *(const vf *)(x + i);
        sum += at * at;
    }
    float total = sum_of(sum);
    for (int64_t rest = i; rest < width; rest++) total += x[rest] * x[rest];
    float inverse = 1.0f / sqrtf(total / width + eps);
    for (i = 0; i < width; i++) y[i] = x[i] * inverse * gain[i];
}

/* The norm of one head, if it has a gain, and RoPE, in place. */
static void rotate(float *x, const float *gain, const float *cosine, const float *sine, int64_t rotated, const Shape *s) {
    if (gain) norm(x, gain, s->head_dim, s->eps, x);
    int64_t half = rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[half + i] + a * sine[i];
    }
}

/* The thread's share of the norms and RoPE of queries and keys, and of writing keys and values to the cache. */
static void write_rows(const Shape *s, const Layer *w, const Pass *p, int64_t layer, float *qkv) {
    int64_t d = s->head_dim, G = s->kv_heads, heads = s->heads, each = heads + G, first, end;
    float *keys = p->cache + 2 * layer * G * p->slots * d, *values = keys + G * p->slots * d;
    share_of(p->rows * each, &first, &end);
    for (int64_t unit = first; unit < end; unit++) {
        int64_t m = unit / each, h = unit % each, at = m / (p->rows / p->angles) * p->rotated;
        float *x = qkv + m * (heads + 2 * G) * d + h * d;
        rotate(x, h < heads ? w->q_norm : w->k_norm, p->cosine + at, p->sine + at, p->rotated, s);
        if (h >= heads) {
            int64_t slot = ((h - heads) * p->slots + p->slot[m]) * d;
            memcpy(keys + slot, x, d * sizeof(float));
            memcpy(values + slot, x + G * d, d * sizeof(float));
        }
    }
}

/* The scores of `count` slots, some at a time so that their sums do not wait for each other. */
static inline __attribute__((always_inline)) void scores_of(
    const float *query, const float *keys, int64_t d, float scale, const int count, float *score
) {
    vf sum[4];
#pragma GCC unroll 4
    for (int k = 0; k < count; k++) sum[k] = (vf){0};
    for (int64_t i = 0; i < d; i += LANES)
#pragma GCC unroll 4
        for (int k = 0; k < count; k++) sum[k] += *(const vf *)(query + i) * *(const vf *)(keys + k * d + i);
#pragma GCC unroll 4
    for (int k = 0; k < count; k++) score[k] = sum_of(sum[k]) * scale;
}

/* The largest of BLOCK numbers and another; NaN if there is one. */
static float largest_of(const float *x, float other) {
    vf most = (vf){0} + other, sum = {0};
    for (int64_t k = 0; k < BLOCK; k += LANES) {
        vf at = *(const vf *)(x + k);
        vi more = at > most;
        most = (vf)(((vi)at & more) | ((vi)most & ~more));
        sum += at; /* of numbers and -INFINITY, it is NaN only with one */
    }
    float total = sum_of(sum), found = most[0];
    for (int i = 1; i < LANES; i++) found = most[i] > found ? most[i] : found;
    return total != total ? total : found;
}

/* out = out * before + the weighted sum of values, of `vectors` times LANES dimensions. */
static inline __attribute__((always_inline)) void add_values(
    const float *weight, const float *values, int64_t count, int64_t d, float before, const int vectors, float *out
) {
    vf sum[8];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) sum[v] = *(vf *)(out + v * LANES) * before;
    for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[v] += weight[k] * *(const vf *)(values + k * d + v * LANES);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) *(vf *)(out + v * LANES) = sum[v];
}

/* The thread's share of the attention of all queries and heads. Units of one key head are next to each other, and go
 * through the slots together, in blocks, so that a thread reads keys and values once. */
static void attend(
    const Shape *s, const Layer *w, const Pass *p, int64_t layer, int whole, const float *qkv, float *y
) {
    int64_t queries = whole ? p->rows : p->queries, S = queries / p->sequences, J = p->new_slots;
    int64_t d = s->head_dim, G = s->kv_heads, H = s->heads, group = H / G, O = (H + 2 * G) * d, begin, end;
    share_of(queries * H, &begin, &end);
    while (begin < end) {
        int64_t shared = begin / (group * S), next = (shared + 1) * group * S, b = shared / G, g = shared % G;
        int64_t length = p->length[b], units = (next < end ? next : end) - begin;
        const float *keys = p->cache + ((2 * layer * G + g) * p->slots + p->start[b]) * d;
        const float *values = keys + G * p->slots * d;
        float largest[units], total[units];
        for (int64_t from = 0; from < length + J; from += BLOCK) {
            int64_t count = length + J - from < BLOCK ? length + J - from : BLOCK;
            for (int64_t u = 0; u < units; u++) {
                int64_t in = begin + u - shared * group * S, q = b * S + in / group, h = g * group + in % group;
                int64_t low = w->window ? (whole ? length + q : p->position[q]) - w->window + 1 : 0; /* first seen */
                int64_t last = whole ? q : p->last ? p->last[q] : J - 1; /* new slot that may be seen */
                const float *query = qkv + (whole || !p->asked ? q : p->asked[q]) * O + h * d;
                float *out = y + (q * H + h) * d, score[BLOCK];
                if (!from) {
                    largest[u] = -INFINITY, total[u] = 0;
                    memset(out, 0, d * sizeof(float));
                }
                if (from + count <= low || from > length + last) continue;
                for (int64_t k = 0; k < BLOCK; k += 4) {
                    if (k + 4 <= count) scores_of(query, keys + (from + k) * d, d, s->scale, 4, score + k);
                    else
                        for (int64_t one = k; one < k + 4; one++)
                            if (one < count) scores_of(query, keys + (from + one) * d, d, s->scale, 1, score + one);
                            else score[one] = -INFINITY;
                }
                for (int64_t k = 0; k < low - from; k++) score[k] = -INFINITY;
                for (int64_t j = from < length ? 0 : from - length; j < from + count - length; j++)
                    if (j > last || (p->mask && !p->mask[q * J + j])) score[length + j - from] = -INFINITY;
                float most = largest_of(score, largest[u]);
                if (most == -INFINITY) continue; /* nothing is seen */
                float before = largest[u] == -INFINITY ? 0.0f : exp_one(largest[u] - most);
                vf weights = {0};
                for (int64_t k = 0; k < BLOCK; k += LANES) {
                    vf at = *(vf *)(score + k);
                    vi seen = at != (vf){0} - INFINITY;
                    weights += *(vf *)(score + k) = (vf)((vi)exp_of(at - most) & seen);
                }
                int64_t i = 0;
                for (; i + 8 * LANES <= d; i += 8 * LANES)
                    add_values(score, values + from * d + i, count, d, before, 8, out + i);
                for (; i < d; i += LANES) add_values(score, values + from * d + i, count, d, before, 1, out + i);
                largest[u] = most;
                total[u] = total[u] * before + sum_of(weights);
            }
        }
        for (int64_t u = 0; u < units; u++) {
            int64_t in = begin + u - shared * group * S, q = b * S + in / group, h = g * group + in % group;
            for (int64_t i = 0; i < d; i++) y[(q * H + h) * d + i] /= total[u];
        }
        begin += units;
    }
}

/* All layers. Returns 0, or 1 without memory. */
int fledge_layers(const Shape *s, const Layer *layers, int64_t count, const Pass *p) {
    int64_t M = p->rows, E = s->width, d = s->head_dim, all = (s->heads + 2 * s->kv_heads) * d;
    int64_t most = M > p->queries ? M : p->queries;
    int64_t shared = most * (all + s->heads * d + s->inner), own_size = most * 2 * E;
    float *memory = malloc((shared + p->threads * own_size) * sizeof(float));
    if (!memory) return 1;
    float *qkv = memory, *heads = qkv + most * all, *inner = heads + most * s->heads * d;
#pragma omp parallel num_threads((int)p->threads)
    {
        float *normed = memory + shared + omp_get_thread_num() * own_size, *x = p->x;
        int64_t rows = M;
        for (int64_t l = 0; l < count; l++) {
            const Layer *w = layers + l;
            int last = l == count - 1;
            const int64_t *asked = last ? p->asked : NULL;
            for (int64_t a = 0; a < p->aux_layers; a++)
                if (p->aux_layer[a] == l) {
                    int64_t first, end;
                    share_of(M, &first, &end);
                    for (int64_t m = first; m < end; m++)
                        memcpy(p->aux + (m * p->aux_layers + a) * E, x + m * E, E * sizeof(float));
                }
            const float *input = l == 0 && p->first ? p->first : normed;
            if (l == 0 && p->token) {
                for (int64_t m = 0; m < M; m++) {
                    norm(p->embedding + p->token[m] * E, p->token_gain, E, s->eps, normed + 2 * m * E);
                    norm(x + m * E, p->state_gain, E, s->eps, normed + (2 * m + 1) * E);
                }
                if (p->normed_residual) {
#pragma omp barrier
#pragma omp single
                    for (int64_t m = 0; m < M; m++) memcpy(x + m * E, normed + (2 * m + 1) * E, E * sizeof(float));
                }
            } else if (input == normed)
                for (int64_t m = 0; m < M; m++) norm(x + m * E, w->input_norm, E, s->eps, normed + m * E);
            product(&w->qkv, input, M, qkv, 0);
#pragma omp barrier
            write_rows(s, w, p, l, qkv);
#pragma omp barrier
            attend(s, w, p, l, p->asked && !last, qkv, heads);
            if (last) rows = p->queries;
            if (asked) {
#pragma omp single
                for (int64_t q = 0; q < rows; q++) memcpy(p->out + q * E, x + asked[q] * E, E * sizeof(float));
                x = p->out;
            } else {
#pragma omp barrier
            }
            product(&w->out, heads, rows, x, 1);
#pragma omp barrier
            for (int64_t m = 0; m < rows; m++) norm(x + m * E, w->post_norm, E, s->eps, normed + m * E);
            swiglu(&w->gate_up, normed, rows, inner);
#pragma omp barrier
            product(&w->down, inner, rows, x, 1);
#pragma omp barrier
        }
#pragma omp single
        {
            for (int64_t a = 0; a < p->aux_layers; a++)
                if (p->aux_layer[a] == count)
                    for (int64_t m = 0; m < rows; m++)
                        memcpy(p->aux + (m * p->aux_layers + a) * E, x + m * E, E * sizeof(float));
            if (p->final_norm)
                for (int64_t m = 0; m < rows; m++) norm(x + m * E, p->final_norm, E, s->eps, p->normed + m * E);
        }
    }
    free(memory);
    return 0;
}

/* y = x W' + b of rows [M, inputs], contiguous. */
void fledge_product(const Weight *w, int64_t rows, const float *x, float *y, int64_t threads) {
#pragma omp parallel num_threads((int)threads)
    product(w, x, rows, y, 0);
}

/* Random numbers as ops/sampling.py has them. SplitMix64's finaliser; the state of a key; the random bits of a state
 * at a token, and their Gumbel noise. */
#define GOLDEN 0x9E3779B97F4A7C15u
static inline uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

void fledge_states(
    int64_t n, const int64_t *seed, const int64_t *request, const int64_t *position, int64_t purpose, int64_t *state
) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t x = mixed(mixed(GOLDEN + (uint64_t)seed[i]) + GOLDEN + (uint64_t)request[i]);
        state[i] = (int64_t)mixed(mixed(x + GOLDEN + (uint64_t)position[i]) + GOLDEN + (uint64_t)purpose);
    }
}

static inline uint64_t bits_of(int64_t state, int64_t token) {
    return mixed((uint64_t)(token + 1) * GOLDEN + (uint64_t)state);
}

static double noise_of(uint64_t bits) { return -log(-log(((double)(bits >> 12) + 0.5) * 0x1p-52)); }

/* The likeliest of W tokens; with a temperature above 0, of logits / temperature + noise. `sure` is 0 where another
 * rounding of the logarithms could change it, and where numbers are not finite or large. */
static int64_t chosen(
    const float *logits, int64_t W, const int64_t *target_id, double temperature, int64_t state, int *sure
) {
    int64_t best = 0;
    int nan = 0;
    for (int64_t i = 0; i < W; i++) nan |= logits[i] != logits[i];
    for (int64_t i = 1; i < W; i++)
        if (logits[i] > logits[best]) best = i;
    *sure = 0;
    if (!(temperature > 0)) return best;
    int64_t top = best;
    double most = logits[best] / temperature + noise_of(bits_of(state, target_id ? target_id[best] : best));
    double level = most, next = -INFINITY;
    float scale = 1 / temperature;
    /* With E = -log(u), noise is -log(E), and 1 - u <= E. A token whose 1 - u is above exp(score - level) can't win; the
     * upper bits of its random number tell, without a logarithm. */
    for (int64_t from = 0; from < W; from += LANES) {
        int64_t count = W - from < LANES ? W - from : LANES;
        vf score = (vf){0} - INFINITY, rest = (vf){0};
        for (int64_t k = 0; k < count; k++) {
            score[k] = logits[from + k] * scale - (float)level;
            uint64_t bits = bits_of(state, target_id ? target_id[from + k] : from + k);
            rest[k] = 1.0f - (float)(uint32_t)(bits >> 32) * 0x1p-32f;
        }
        vi can = rest <= exp_of(score) * 1.002f + 0x1p-20f;
        for (int64_t k = 0; k < count; k++) {
            int64_t i = from + k;
            if (!can[k] || i == top) continue;
            double value = logits[i] / temperature + noise_of(bits_of(state, target_id ? target_id[i] : i));
            if (value > most || (value == most && i < best)) next = most, most = value, best = i;
            else if (value > next) next = value;
        }
    }
    *sure = !nan && fabs(level) < 4096 && most - next > 1e-9;
    return best;
}

/* The argmax of scores [rows, V] plus the noise of the rows' states; -1 where ops/sampling.py has to decide. */
void fledge_draws(int64_t rows, int64_t V, const float *scores, const int64_t *state, int64_t *token, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && rows > 1)
    for (int64_t m = 0; m < rows; m++) {
        int sure;
        int64_t found = chosen(scores + m * V, V, NULL, 1.0, state[m], &sure);
        token[m] = sure ? found : -1;
    }
}

/* Logits [rows, W] over temperature, plus the noise with which the target draws at the same position, of tokens whose
 * ids there are `target_id` (NULL: the same). Rows of temperature 0 stay as they are. */
void fledge_coupled(
    int64_t rows, int64_t W, const float *logits, const int64_t *target_id, const double *temperature,
    const int64_t *state, float *noisy
) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < W; i++) {
            int64_t at = m * W + i;
            noisy[at] = logits[at];
            if (temperature[m] > 0)
                noisy[at] = logits[at] / temperature[m] + noise_of(bits_of(state[m], target_id ? target_id[i] : i));
        }
}

/* A chain of the draft p of one row per sequence: `count` times, the layers, the head, and the likeliest token, which
 * the next step reads with this one's state; with the noise of `noise` [count, M] for temperatures [M] above 0. `p` is the first step's, with the angles and slots of all steps one
 * after the other; `state` [M, E] and p->token are what it reads, and token [count, M] is what it finds. p->x, which is
 * p->out, and p->normed are buffers. Returns 0, or 1 without memory. */
int fledge_chain(
    const Shape *s, const Layer *layers, int64_t layer_count, const Pass *first, const Weight *head,
    const int64_t *target_id, const int64_t *noise, const double *temperature, int64_t normed_state, const float *state,
    int64_t count, int64_t *token
) {
    Pass p = *first;
    int64_t M = p.rows, W = head->outputs, size = M * s->width * sizeof(float);
    float *logits = malloc(M * W * sizeof(float));
    int failed = !logits;
    for (int64_t k = 0; k < count && !failed; k++) {
        if (state != p.x) memcpy(p.x, state, size);
        failed = fledge_layers(s, layers, layer_count, &p);
        if (!failed) fledge_product(head, M, p.normed, logits, p.threads);
        for (int64_t m = 0; m < M && !failed; m++) {
            int sure;
            int64_t best = noise ? chosen(logits + m * W, W, target_id, temperature[m], noise[k * M + m], &sure)
                                 : chosen(logits + m * W, W, target_id, 0, 0, &sure);
            token[k * M + m] = target_id ? target_id[best] : best;
        }
        state = normed_state ? p.normed : p.x;
        p.token = token + k * M;
        p.slot += M, p.new_slots++, p.cosine += M * p.rotated, p.sine += M * p.rotated;
    }
    free(logits);
    return failed;
}
