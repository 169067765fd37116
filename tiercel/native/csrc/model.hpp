// What the code paths share: packed matrices, models, and the working memory of a step.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "team.hpp"
#include "tiercel.h"

constexpr int64_t BLOCK = 32;  // columns per block
constexpr int64_t PANEL = 16;  // output rows that lie side by side: the lanes of the widest vector

template <class T>
struct AlignedArray {
    T *data = nullptr;
    size_t size = 0;
    AlignedArray() = default;
    AlignedArray(const AlignedArray &) = delete;
    AlignedArray &operator=(const AlignedArray &) = delete;
    ~AlignedArray() { std::free(data); }
    // Room for `count` elements; old contents are lost when it grows.
    T *need(size_t count) {
        if (count > size) {
            std::free(data);
            const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
            data = static_cast<T *>(std::aligned_alloc(64, bytes));
            if (!data) throw std::bad_alloc();
            size = count;
        }
        return data;
    }
};

// Rows are cut into panels of 16 (the last one filled up with zeros), panels into blocks of 32 columns.
//
// Q4: a block of a panel is 4 groups of 8 columns; a group is 16 lanes x 4 bytes; byte j of a lane holds column j of the group in
//     its low and column j + 4 in its high nibble.
// Q8: a block is 8 groups of 4 columns; a group is 16 lanes x 4 bytes.
// F32 and BF16: column after column, 16 lanes each.
// Scales (fp16, as in the file) and, for Q4_1, minima: [panel][block][lane]; for Q8_0 also minus the sum of the block's integers.
struct tc_matrix {
    int format;
    int64_t rows, columns, panels, blocks;
    AlignedArray<uint8_t> data;
    AlignedArray<uint16_t> scales, minima;
    AlignedArray<int16_t> negated_sums;

    int64_t block_bytes() const { return format == TC_Q8_0 ? 512 : 256; }
    int64_t panel_bytes() const {
        if (format == TC_F32) return columns * PANEL * 4;
        if (format == TC_BF16) return columns * PANEL * 2;
        return blocks * block_bytes();
    }
    bool is_quantised() const { return format != TC_F32 && format != TC_BF16; }
};

// Rows of one matrix input: floats [row][column], and for quantised matrices integers of `bits` bits with a scale per block.
//   x = scale * q with scale = max |x| / (2^(bits - 1) - 1) over the block and q = x / scale rounded to nearest, ties to even;
//   sums holds scale * (sum of q), which multiplies a block's minimum.
// Rows go in groups, as many as a code path computes together, so that one pointer walks through all rows of a group: scales and
// sums are [group][block][row]; q is [group][block][pair][row][2] with the columns of a pair in the order of `unpack16`, or
// [group][block][four columns][row][4].
struct Activations {
    int bits = 16;
    AlignedArray<float> x, scales, sums;
    AlignedArray<uint8_t> q;
    int16_t *q16() const { return reinterpret_cast<int16_t *>(q.data); }
    int8_t *q8() const { return reinterpret_cast<int8_t *>(q.data); }
    void need(int64_t rows, int64_t columns, int64_t group) {
        const int64_t padded = (rows + group - 1) / group * group;
        x.need(rows * columns);
        q.need(padded * columns * bits / 8);
        scales.need(padded * (columns / BLOCK + 1));
        sums.need(padded * (columns / BLOCK + 1));
    }
};

// Pieces of the longest context, units of work, and whether every piece is one.
struct AttentionPlan {
    int64_t pieces, units;
    bool is_split;
};

struct Workspace {
    Activations in;
    AlignedArray<float> qkv, attended, gate_up, cosines, sines, partials, pieces, joined, best_values, best_masses;
    AttentionPlan attention;
    AlignedArray<int64_t> best_ids;
};

struct tc_model {
    tc_shape shape;
    int bits;
    const tc_matrix *embedding;
    std::vector<tc_layer> layers;
    const float *enorm = nullptr, *hnorm = nullptr, *norm = nullptr;
    const tc_matrix *eh_proj = nullptr, *head = nullptr;
    Workspace work;
};

// One instruction set's code.
struct CodePath {
    const char *name;
    void (*run)(tc_model &, const tc_step &, Team &);
    void (*apply)(const tc_matrix &, int bits, const float *x, int64_t rows, float *out, Team &);
};
extern const CodePath avx512vnni_path, avx2_path, portable_path;

void dequantise_row(const tc_matrix &, int64_t row, float *out);
float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);
