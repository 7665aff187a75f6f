/* The passes over memory in a training step, each fused into one. `passes.py` compiles and calls
   them; `gradients.py` has the same in torch. All arrays are contiguous float32.

   B rows, L positions (a multiple of 8), D size of a head, R half of its rotated part, H hidden,
   T tokens, K experts of a token, S = T K tokens sorted by expert, F inner size of an expert. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(32), aligned(4)));

/* ROWS x 8 VECTORS of C (+)= A B, in registers. A has steps (down, along): it may be transposed. */
#define TILE(ROWS, VECTORS)                                                                       \
    static void tile##ROWS##x##VECTORS(long inner, const float *a, long down, long along,         \
                                       const float *b, long width, float *c, long c_width,        \
                                       int add) {                                                 \
        vec sum[ROWS][VECTORS];                                                                   \
        _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++)                                    \
            _Pragma("GCC unroll 2") for (int j = 0; j < VECTORS; j++)                             \
                sum[i][j] = add ? *(vec *)(c + i * c_width + 8 * j) : (vec){0};                   \
        for (long k = 0; k < inner; k++) {                                                        \
            vec row[VECTORS];                                                                     \
            _Pragma("GCC unroll 2") for (int j = 0; j < VECTORS; j++)                             \
                row[j] = *(const vec *)(b + k * width + 8 * j);                                   \
            _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++)                                \
                _Pragma("GCC unroll 2") for (int j = 0; j < VECTORS; j++)                         \
                    sum[i][j] += a[i * down + k * along] * row[j];                                \
        }                                                                                         \
        _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++)                                    \
            _Pragma("GCC unroll 2") for (int j = 0; j < VECTORS; j++)                             \
                *(vec *)(c + i * c_width + 8 * j) = sum[i][j];                                    \
    }
TILE(6, 2)
TILE(4, 2)
TILE(2, 2)
TILE(6, 1)
TILE(4, 1)
TILE(2, 1)

/* C[rows, columns] (+)= A[rows, inner] B[inner, columns]; rows even, columns a multiple of 8. */
static void product(long rows, long columns, long inner, const float *a, long down, long along,
                    const float *b, long width, float *c, long c_width, int add) {
    for (long n = 0; n < columns; n += n + 16 <= columns ? 16 : 8) {
        int wide = n + 16 <= columns;
        for (long m = 0, step; m < rows; m += step) {
            step = rows - m >= 6 ? 6 : rows - m >= 4 ? 4 : 2;
            (step == 6   ? wide ? tile6x2 : tile6x1
             : step == 4 ? wide ? tile4x2 : tile4x1
                         : wide ? tile2x2 : tile2x1)(inner, a + m * down, down, along, b + n, width,
                                                     c + m * c_width + n, c_width, add);
        }
    }
}

void rms_norm(long t, long h, float eps, const float *restrict x, const float *restrict w,
              float *restrict y, float *restrict scale) {
    for (long i = 0; i < t; i++, x += h, y += h) {
        float square = 0;
        for (long j = 0; j < h; j++) square += x[j] * x[j];
        float s = scale[i] = 1 / sqrtf(square / h + eps);
        for (long j = 0; j < h; j++) y[j] = x[j] * s * w[j];
    }
}

void rms_norm_back(long t, long h, const float *x, const float *w, const float *scale,
                   const float *dy, float *dx, float *dw) {
    for (long i = 0; i < t; i++, x += h, dy += h, dx += h) {
        float along = 0, s = scale[i];
        for (long j = 0; j < h; j++) {
            along += dy[j] * w[j] * x[j];
            dw[j] += dy[j] * x[j] * s;
        }
        along *= s * s / h;
        for (long j = 0; j < h; j++) dx[j] = s * (dy[j] * w[j] - x[j] * along);
    }
}

/* Apply norm and rotary embedding to one head's vector; return the norm's scale. */
INLINE float turned(int d, int r, float eps, const float *restrict x, const float *restrict w,
                    const float *restrict cosine, const float *restrict sine, float *restrict y) {
    float square = 0;
    for (int i = 0; i < d; i++) square += x[i] * x[i];
    float s = 1 / sqrtf(square / d + eps);
    for (int i = 0; i < r; i++) {
        float a = x[i] * s * w[i], b = x[i + r] * s * w[i + r];
        y[i] = a * cosine[i] - b * sine[i];
        y[i + r] = b * cosine[i] + a * sine[i];
    }
    for (int i = 2 * r; i < d; i++) y[i] = x[i] * s * w[i];
    return s;
}

/* Write the gradient of `turned` to dx, and add that of its weight to dw; changes dy. */
INLINE void turned_back(int d, int r, float s, const float *restrict x, const float *restrict w,
                        const float *restrict cosine, const float *restrict sine,
                        float *restrict dy, float *restrict dx, float *restrict dw) {
    for (int i = 0; i < r; i++) {
        float a = dy[i], b = dy[i + r];
        dy[i] = a * cosine[i] + b * sine[i];
        dy[i + r] = b * cosine[i] - a * sine[i];
    }
    float along = 0;
    for (int i = 0; i < d; i++) {
        along += dy[i] * w[i] * x[i];
        dw[i] += dy[i] * x[i] * s;
    }
    along *= s * s / d;
    for (int i = 0; i < d; i++) dx[i] = s * (dy[i] * w[i] - x[i] * along);
}

typedef struct {
    long rows, length, heads, key_heads, dim, half, block;
    float eps;
} Sizes;

/* Softmax of q k^T for one head, from rotated queries and rotated, transposed keys. A block of
   positions attends to itself and the blocks before it. */
static void probabilities(const Sizes *z, const float *q, const float *k_across, float *p) {
    long l = z->length, d = z->dim;
    for (long start = 0; start < l; start += z->block) {
        long seen = start + z->block < l ? start + z->block : l;
        product(seen - start, seen, d, q + start * d, d, 1, k_across, l, p + start * l, l, 0);
        for (long i = start; i < seen; i++) {
            float *row = p + i * l, most = -1e30f, sum = 0;
            for (long j = 0; j < seen; j++) most = row[j] > most ? row[j] : most;
            for (long j = 0; j < seen; j++) {
                row[j] = expf(row[j] - most);
                sum += row[j];
            }
            sum = 1 / sum;
            for (long j = 0; j < seen; j++) row[j] *= sum;
        }
    }
}

static void across(long l, long d, const float *x, long width, float *y) {
    for (long i = 0; i < l; i++)
        for (long j = 0; j < d; j++) y[j * l + i] = x[i * width + j];
}

/* Attention from unnormed queries, keys and values side by side in qkv [B, L, (h + 2 g) D]. */
INLINE void attend_sized(const Sizes *z, const long d, const long r, const float *qkv,
                         const float *q_w, const float *k_w, const float *cosine,
                         const float *sine, float *y) {
    long l = z->length, group = z->heads / z->key_heads;
    long width = (z->heads + 2 * z->key_heads) * d, out = z->heads * d;
    float *k = malloc(sizeof(float) * (3 * l * d + l * l)), *k_across = k + l * d;
    float *q = k_across + l * d, *p = q + l * d, root = 1 / sqrtf(d);
    for (long b = 0; b < z->rows; b++) {
        const float *row = qkv + b * l * width, *c = cosine, *s = sine;
        for (long g = 0; g < z->key_heads; g++) {
            const float *keys = row + (z->heads + g) * d, *values = keys + z->key_heads * d;
            for (long i = 0; i < l; i++)
                turned(d, r, z->eps, keys + i * width, k_w, c + i * r, s + i * r, k + i * d);
            across(l, d, k, d, k_across);
            for (long h = g * group; h < (g + 1) * group; h++) {
                for (long i = 0; i < l; i++)
                    turned(d, r, z->eps, row + i * width + h * d, q_w, c + i * r, s + i * r,
                           q + i * d);
                for (long i = 0; i < l * d; i++) q[i] *= root;
                probabilities(z, q, k_across, p);
                for (long i = 0; i < l; i += z->block) {
                    long seen = i + z->block < l ? i + z->block : l;
                    product(seen - i, d, seen, p + i * l, l, 1, values, width,
                            y + (b * l + i) * out + h * d, out, 0);
                }
            }
        }
    }
    free(k);
}

/* The gradients of `attend`; those of the norms' weights are added to dq_w and dk_w. */
INLINE void attend_back_sized(const Sizes *z, const long d, const long r, const float *qkv,
                              const float *q_w, const float *k_w, const float *cosine,
                              const float *sine, const float *dy, float *dqkv, float *dq_w,
                              float *dk_w) {
    long l = z->length, group = z->heads / z->key_heads;
    long width = (z->heads + 2 * z->key_heads) * d, out = z->heads * d;
    float *k = malloc(sizeof(float) * (6 * l * d + 2 * l * l + 2 * l)), *k_across = k + l * d;
    float *v_across = k_across + l * d, *q = v_across + l * d, *dk = q + l * d, *dq = dk + l * d;
    float *p = dq + l * d, *dp = p + l * l, *k_scale = dp + l * l, *q_scale = k_scale + l;
    float root = 1 / sqrtf(d);
    for (long b = 0; b < z->rows; b++) {
        const float *row = qkv + b * l * width, *c = cosine, *s = sine;
        float *d_row = dqkv + b * l * width;
        for (long g = 0; g < z->key_heads; g++) {
            long at = (z->heads + g) * d, at_value = at + z->key_heads * d;
            for (long i = 0; i < l; i++)
                k_scale[i] = turned(d, r, z->eps, row + i * width + at, k_w, c + i * r, s + i * r,
                                    k + i * d);
            across(l, d, k, d, k_across);
            across(l, d, row + at_value, width, v_across);
            for (long h = g * group; h < (g + 1) * group; h++) {
                int more = h > g * group;
                const float *dy_head = dy + b * l * out + h * d;
                for (long i = 0; i < l; i++)
                    q_scale[i] = turned(d, r, z->eps, row + i * width + h * d, q_w, c + i * r,
                                        s + i * r, q + i * d);
                for (long i = 0; i < l * d; i++) q[i] *= root;
                probabilities(z, q, k_across, p);
                for (long n = 0; n < l; n += z->block) {
                    long seen = n + z->block < l ? n + z->block : l;
                    product(seen - n, seen, d, dy_head + n * out, out, 1, v_across, l, dp + n * l,
                            l, 0);
                    for (long i = n; i < seen; i++) {
                        float *pi = p + i * l, *di = dp + i * l, along = 0;
                        for (long j = 0; j < seen; j++) along += pi[j] * di[j];
                        for (long j = 0; j < seen; j++) di[j] = pi[j] * (di[j] - along);
                    }
                    product(seen - n, d, seen, dp + n * l, l, 1, k, d, dq + n * d, d, 0);
                }
                for (long n = 0; n < l; n += z->block) { /* keys, and the queries that see them */
                    long seen = n + z->block < l ? n + z->block : l;
                    product(seen - n, d, l - n, p + n * l + n, 1, l, dy_head + n * out, out,
                            d_row + at_value + n * width, width, more);
                    product(seen - n, d, l - n, dp + n * l + n, 1, l, q + n * d, d, dk + n * d, d,
                            more);
                }
                for (long i = 0; i < l * d; i++) dq[i] *= root;
                for (long i = 0; i < l; i++)
                    turned_back(d, r, q_scale[i], row + i * width + h * d, q_w, c + i * r,
                                s + i * r, dq + i * d, d_row + i * width + h * d, dq_w);
            }
            for (long i = 0; i < l; i++)
                turned_back(d, r, k_scale[i], row + i * width + at, k_w, c + i * r, s + i * r,
                            dk + i * d, d_row + i * width + at, dk_w);
        }
    }
    free(k);
}

/* With sizes known to the compiler these take half the time. */
#define FOR_SIZES(function, ...)                                                                  \
    if (z->dim == 32 && z->half == 16)                                                             \
        function(z, 32, 16, __VA_ARGS__);                                                          \
    else if (z->dim == 32 && z->half == 8)                                                         \
        function(z, 32, 8, __VA_ARGS__);                                                           \
    else                                                                                           \
        function(z, z->dim, z->half, __VA_ARGS__)

void attend(const Sizes *z, const float *qkv, const float *q_w, const float *k_w,
            const float *cosine, const float *sine, float *y) {
    FOR_SIZES(attend_sized, qkv, q_w, k_w, cosine, sine, y);
}

void attend_back(const Sizes *z, const float *qkv, const float *q_w, const float *k_w,
                 const float *cosine, const float *sine, const float *dy, float *dqkv, float *dq_w,
                 float *dk_w) {
    FOR_SIZES(attend_back_sized, qkv, q_w, k_w, cosine, sine, dy, dqkv, dq_w, dk_w);
}

/* silu(gate) up, for gate and up side by side in x [rows, 2 F]. */
void swiglu(long rows, long f, const float *x, float *y) {
    for (long i = 0; i < rows; i++, x += 2 * f, y += f)
        for (long j = 0; j < f; j++) y[j] = x[j] / (1 + expf(-x[j])) * x[j + f];
}

void swiglu_back(long rows, long f, const float *x, const float *dy, float *dx) {
    for (long i = 0; i < rows; i++, x += 2 * f, dx += 2 * f, dy += f)
        for (long j = 0; j < f; j++) {
            float share = 1 / (1 + expf(-x[j])), silu = x[j] * share;
            dx[j + f] = dy[j] * silu;
            dx[j] = dy[j] * x[j + f] * (share + silu * (1 - share));
        }
}

/* Find the place of each chosen expert's copy of a token, sorted by expert, and copy x there. */
void scatter(long t, long k, long experts, long h, long room, const int64_t *chosen, const float *x,
             int64_t *place, float *sorted) {
    int64_t next[experts];
    for (long e = 0; e < experts; e++) next[e] = e * room;
    for (long i = 0; i < t * k; i++) {
        place[i] = next[chosen[i]]++;
        memcpy(sorted + place[i] * h, x + i / k * h, h * sizeof *x);
    }
}

/* y = the weighted sum of a token's copies; without weights, their sum. */
void combine(long t, long k, long h, const int64_t *place, const float *weight, const float *sorted,
             float *y) {
    for (long i = 0; i < t; i++, y += h)
        for (long n = 0; n < k; n++) {
            const float *copy = sorted + place[i * k + n] * h;
            float w = weight ? weight[i * k + n] : 1;
            for (long j = 0; j < h; j++) y[j] = n ? y[j] + w * copy[j] : w * copy[j];
        }
}

void combine_back(long t, long k, long h, const int64_t *place, const float *weight,
                  const float *sorted, const float *dy, float *d_sorted, float *d_weight) {
    for (long i = 0; i < t; i++, dy += h)
        for (long n = 0; n < k; n++) {
            long at = place[i * k + n] * h;
            float dot = 0, w = weight[i * k + n];
            for (long j = 0; j < h; j++) {
                dot += dy[j] * sorted[at + j];
                d_sorted[at + j] = w * dy[j];
            }
            d_weight[i * k + n] = dot;
        }
}

/* Weighted cross entropy: the logits become their gradient. */
void cross_entropy(long n, long v, float *x, const int64_t *target, const float *weight,
                   float *loss, float *right) {
    double all = 0, hits = 0;
    for (long i = 0; i < n; i++, x += v) {
        float most = -1e30f, sum = 0, own = x[target[i]];
        for (long j = 0; j < v; j++) most = x[j] > most ? x[j] : most;
        hits += own == most ? weight[i] : 0;
        for (long j = 0; j < v; j++) {
            x[j] = expf(x[j] - most);
            sum += x[j];
        }
        all += weight[i] * (logf(sum) + most - own);
        float share = weight[i] / sum;
        for (long j = 0; j < v; j++) x[j] *= share;
        x[target[i]] -= weight[i];
    }
    *loss = all;
    *right = hits;
}
