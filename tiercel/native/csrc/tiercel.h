// The C interface of Tiercel's CPU library: quantised matrices, and models that run a whole step in one call.
//
// Pointers that a model is given are borrowed: the caller keeps matrices and vectors alive as long as the model.
// All floats are IEEE binary32. Nothing here reports errors: the Python side checks every shape before it calls.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Formats carry ggml's type numbers. A block is 32 consecutive columns of one row.
enum tc_format {
    TC_F32 = 0,
    TC_Q4_0 = 2,   // w = d (q - 8), q in 0..15: fp16 d, 16 bytes (byte j: column j low, column j + 16 high)
    TC_Q4_1 = 3,   // w = d q + m:               fp16 d, fp16 m, 16 bytes as above
    TC_Q8_0 = 8,   // w = d q, q signed:         fp16 d, 32 bytes
    TC_BF16 = 30,
};

typedef struct tc_matrix tc_matrix;
typedef struct tc_model tc_model;

// Sizes and conventions of a decoder layer; target_hidden and embedding_first matter to MTP layers only.
typedef struct {
    int64_t hidden, intermediate, heads, kv_heads, head_dim, target_hidden;
    double rope_theta, eps;
    int32_t embedding_first;
} tc_shape;

typedef struct {
    const float *attn_norm, *mlp_norm, *qkv_bias;  // qkv_bias may be null
    const tc_matrix *qkv, *out, *gate_up, *down;
} tc_layer;

// One forward over `rows` rows of `segments` requests.
typedef struct {
    int64_t rows;
    const int64_t *token_ids, *positions;       // [rows]
    const float *target_hidden;                 // [rows, target_hidden]; MTP layers only
    int64_t segments;
    const int64_t *segment_rows;                // [segments + 1]: first row of each segment, then rows
    const int64_t *const *slots;                // [segments]: KV slot of every position of that request
    // Where rows form trees (else null): rows of segment s at positions from bases[s] on see, from there, the slots that their row
    // of tails names for positions bases[s], bases[s] + 1, ... up to their own, in place of those in slots[s].
    const int64_t *bases;                       // [segments]
    const int64_t *tails;                       // [rows, tail_width]
    int64_t tail_width;
    int64_t pool;                               // KV slots in all
    void *const *keys, *const *values;          // [layers]: each [kv_heads, pool, head_dim], float32 or fp16
    int32_t kv_is_half;                         // which of the two
    float *hidden;                              // out [rows, hidden], before the final norm
    int64_t num_taps;
    const int64_t *taps;                        // [num_taps]: layers that have run where hidden states are wanted
    float *tapped;                              // out [rows, num_taps, hidden]
    int64_t wanted;
    const int64_t *wanted_rows;                 // [wanted]: rows whose next token is asked for
    float *logits;                              // out [wanted, vocabulary], or null
    int64_t *best;                              // out [wanted]: argmax (lowest index of equals), -1 where a logit is NaN
    float *confidence;                          // out [wanted]: probability of best under the softmax (0 where it is -1), or null
} tc_step;

// MTP layers one after the other over the rows of one step, each proposing greedily what the next one reads.
typedef struct {
    int64_t depth;
    tc_model *const *layers;                    // [depth]
    void *const *keys, *const *values;          // [depth]: each [kv_heads, pool, head_dim]
    int32_t is_chained;                         // layer i > 0 reads the output of layer i - 1, else the target's hidden states
    int64_t *token_ids;                         // [rows]: x[t] of every row; shifted from layer to layer
    const int64_t *known;                       // [depth, wanted]: the token that layer i reads in a request's last row, or -1
    const int64_t *target_ids;                  // [draft vocabulary]
    int64_t *drafts;                            // out [depth, wanted]: target ids; 0 where a logit was NaN
    float *confidence;                          // out [depth, wanted]: as in tc_step
    int64_t *end_ns;                            // out [depth]: when each layer ended, on the monotonic clock
} tc_chain;

// Sum of `count` words, whole cache lines of them: what it takes is the time to read memory, every thread at it.
uint64_t tc_read(const uint64_t *words, int64_t count);

const char *tc_isa(void);                       // code path in use: "avx512vnni", "avx2" or "portable"
int tc_set_isa(const char *name);               // 0, or -1 where this processor lacks it
void tc_set_threads(int count);

tc_matrix *tc_matrix_new(int format, int64_t rows, int64_t columns, const void *data);  // data: rows in the file's layout
void tc_matrix_free(tc_matrix *);
int64_t tc_matrix_bytes(const tc_matrix *);
void tc_matrix_row(const tc_matrix *, int64_t row, float *out);
// out [rows, N] = x [rows, K] Wt; quantised matrices read x as integers of `bits` bits, 8 or 16
void tc_matrix_apply(const tc_matrix *, int bits, const float *x, int64_t rows, float *out);

tc_model *tc_model_new(const tc_shape *, int bits, const tc_matrix *embedding);  // bits: as above
void tc_model_free(tc_model *);
void tc_model_add_layer(tc_model *, const tc_layer *);
void tc_model_set_combine(tc_model *, const float *enorm, const float *hnorm, const tc_matrix *eh_proj);
void tc_model_set_head(tc_model *, const float *norm, const tc_matrix *head);
void tc_model_run(tc_model *, const tc_step *);
// Of `step`, the rows, their positions, slots and pool, target_hidden, and wanted_rows (each request's last row) are read.
void tc_chain_run(const tc_chain *, const tc_step *step);

#ifdef __cplusplus
}
#endif
