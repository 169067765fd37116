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
// Q4: a block of a panel is 4 groups of 8 columns; a group is 16 lanes x 2 words of 16 bits; nibble i of word p of lane n is
//     column 8 g + 2 i + p of row n. One mask and shift therefore yields 16-bit pairs of neighbouring columns in every lane.
// Q8: a block is 16 pairs of columns; a pair is 16 lanes x 2 bytes.
// F32 and BF16: column after column, 16 lanes each.
// Scales (fp16, as in the file) and, for Q4_1, minima: [panel][block][lane].
struct tc_matrix {
    int format;
    int64_t rows, columns, panels, blocks;
    AlignedArray<uint8_t> data;
    AlignedArray<uint16_t> scales, minima;

    int64_t block_bytes() const { return format == TC_Q8_0 ? 512 : 256; }
    int64_t panel_bytes() const {
        if (format == TC_F32) return columns * PANEL * 4;
        if (format == TC_BF16) return columns * PANEL * 2;
        return blocks * block_bytes();
    }
    bool is_quantised() const { return format != TC_F32 && format != TC_BF16; }
};

// Rows of one matrix input: floats, and for quantised matrices 16-bit integers with a scale per block.
//   x = scale * q with scale = max |x| / 32767 over the block and q = x / scale rounded to nearest, ties to even;
//   sums holds scale * (sum of q), which multiplies a block's minimum.
struct Activations {
    AlignedArray<float> x, scales, sums;
    AlignedArray<int16_t> q;
    void need(int64_t rows, int64_t columns) {
        x.need(rows * columns);
        q.need(rows * columns);
        scales.need(rows * (columns / BLOCK + 1));
        sums.need(rows * (columns / BLOCK + 1));
    }
};

struct Workspace {
    Activations in;
    AlignedArray<float> qkv, attended, gate_up, cosines, sines, scores, joined, best_values;
    AlignedArray<int64_t> best_ids;
};

struct tc_model {
    tc_shape shape;
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
    void (*apply)(const tc_matrix &, const float *x, int64_t rows, float *out, Team &);
};
extern const CodePath avx512vnni_path, avx2_path, portable_path;

void dequantise_row(const tc_matrix &, int64_t row, float *out);
float half_to_float(uint16_t bits);
