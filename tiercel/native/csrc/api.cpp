// Packing, dequantisation, and the C interface.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <chrono>
#include <cstring>
#include <mutex>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "model.hpp"

namespace {

std::mutex one_at_a_time;  // the team and the models' working memory belong to one caller at a time
int wanted_threads = 1;

const CodePath *best_path() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        return &avx512vnni_path;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return &avx2_path;
#endif
    return &portable_path;
}

const CodePath *path = best_path();

Team &team() {
    // A fork copies the team but not its threads: the child starts its own and leaves the copy alone.
    static Team *current = nullptr;
    static pid_t owner = 0;
    if (owner != getpid()) current = nullptr;
    if (!current || current->size() != wanted_threads) {
        delete current;
        current = new Team(wanted_threads);
        owner = getpid();
    }
    return *current;
}

struct Bytes {
    int64_t size;
    int nibbles;  // where the values start in a block
};

Bytes block_layout(int format) {
    switch (format) {
    case TC_Q4_0: return {18, 2};
    case TC_Q4_1: return {20, 4};
    default: return {34, 2};
    }
}

uint32_t four_bytes(const uint8_t *p) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
}

void pack_quantised(tc_matrix &m, const uint8_t *source) {
    const Bytes layout = block_layout(m.format);
    for (int64_t row = 0; row < m.rows; row++) {
        const int64_t panel = row / PANEL, lane = row % PANEL;
        for (int64_t b = 0; b < m.blocks; b++) {
            const uint8_t *block = source + (row * m.blocks + b) * layout.size, *values = block + layout.nibbles;
            const int64_t at = panel * m.blocks + b;
            std::memcpy(&m.scales.data[at * PANEL + lane], block, 2);
            if (m.format == TC_Q4_1) std::memcpy(&m.minima.data[at * PANEL + lane], block + 2, 2);
            uint8_t *to = m.data.data + at * m.block_bytes();
            if (m.format == TC_Q8_0) {
                int sum = 0;
                for (int k = 0; k < BLOCK; k += 4) std::memcpy(to + k / 4 * 64 + lane * 4, values + k, 4);
                for (int k = 0; k < BLOCK; k++) sum += static_cast<int8_t>(values[k]);
                m.negated_sums.data[at * PANEL + lane] = static_cast<int16_t>(-sum);
                continue;
            }
            for (int g = 0; g < 4; g++) {  // columns 0 .. 15 are the file's low nibbles, 16 .. 31 its high ones
                const uint8_t *from = values + g % 2 * 8;
                const int shift = g < 2 ? 0 : 4;
                const uint32_t first = four_bytes(from) >> shift & 0x0F0F0F0Fu, second = four_bytes(from + 4) >> shift & 0x0F0F0F0Fu;
                const uint32_t both = first | second << 4;
                std::memcpy(to + g * 64 + lane * 4, &both, 4);
            }
        }
    }
}

template <class T>
void pack_floats(tc_matrix &m, const T *source) {
    T *to = reinterpret_cast<T *>(m.data.data);
    for (int64_t row = 0; row < m.rows; row++)
        for (int64_t k = 0; k < m.columns; k++)
            to[(row / PANEL * m.columns + k) * PANEL + row % PANEL] = source[row * m.columns + k];
}

float brain_to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
}

}  // namespace

float half_to_float(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    uint32_t wide;
    float out;
    if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exact in binary32
        out = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return sign ? -out : out;
    }
    wide = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&out, &wide, sizeof out);
    return out;
}

// To nearest, ties to even; beyond the range the largest number, NaN stays NaN.
uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const float size = std::fabs(x);
    if (size != size) return static_cast<uint16_t>(sign | 0x7E00u);
    if (size >= 65504.0f) return static_cast<uint16_t>(sign | 0x7BFFu);
    if (size < 6.103515625e-5f)  // subnormal: a multiple of 2^-24
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyintf(size * 16777216.0f)));
    const uint32_t wide = (bits & 0x7FFFFFFFu) - (112u << 23), odd = wide >> 13 & 1;
    return static_cast<uint16_t>(sign | (wide + 0xFFFu + odd) >> 13);
}

void dequantise_row(const tc_matrix &m, int64_t row, float *out) {
    const int64_t panel = row / PANEL, lane = row % PANEL;
    if (!m.is_quantised()) {
        for (int64_t k = 0; k < m.columns; k++) {
            const int64_t at = (panel * m.columns + k) * PANEL + lane;
            out[k] = m.format == TC_F32 ? reinterpret_cast<const float *>(m.data.data)[at]
                                        : brain_to_float(reinterpret_cast<const uint16_t *>(m.data.data)[at]);
        }
        return;
    }
    for (int64_t b = 0; b < m.blocks; b++, out += BLOCK) {
        const int64_t at = panel * m.blocks + b;
        const uint8_t *block = m.data.data + at * m.block_bytes();
        const float d = half_to_float(m.scales.data[at * PANEL + lane]);
        const float low = m.format == TC_Q4_1 ? half_to_float(m.minima.data[at * PANEL + lane]) : 0.0f;
        for (int k = 0; k < BLOCK; k++) {
            if (m.format == TC_Q8_0) {
                out[k] = d * static_cast<int8_t>(block[k / 4 * 64 + lane * 4 + k % 4]);
                continue;
            }
            const int q = block[k / 8 * 64 + lane * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
            out[k] = m.format == TC_Q4_0 ? d * static_cast<float>(q - 8) : d * static_cast<float>(q) + low;
        }
    }
}

extern "C" {

const char *tc_isa(void) { return path->name; }

int tc_set_isa(const char *name) {
    const CodePath *best = best_path();
    for (const CodePath *candidate : {
#if defined(__x86_64__)
             &avx512vnni_path, &avx2_path,
#endif
             &portable_path}) {
        if (candidate == &portable_path || candidate == best || best != &portable_path) {
            // A processor with a better path can run every lesser one.
            const bool runs = candidate != &avx512vnni_path || best == &avx512vnni_path;
            if (runs && !std::strcmp(candidate->name, name)) {
                path = candidate;
                return 0;
            }
        }
    }
    return -1;
}

void tc_set_threads(int count) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    wanted_threads = std::max(1, count);
}

tc_matrix *tc_matrix_new(int format, int64_t rows, int64_t columns, const void *data) {
    auto m = std::make_unique<tc_matrix>();
    m->format = format;
    m->rows = rows;
    m->columns = columns;
    m->panels = (rows + PANEL - 1) / PANEL;
    m->blocks = columns / BLOCK;
    const size_t bytes = m->panels * m->panel_bytes();
    std::memset(m->data.need(bytes), 0, bytes);
    if (m->is_quantised()) {
        const size_t count = m->panels * m->blocks * PANEL;
        std::memset(m->scales.need(count), 0, count * 2);
        if (format == TC_Q4_1) std::memset(m->minima.need(count), 0, count * 2);
        if (format == TC_Q8_0) std::memset(m->negated_sums.need(count), 0, count * 2);
        pack_quantised(*m, static_cast<const uint8_t *>(data));
    } else if (format == TC_F32) {
        pack_floats(*m, static_cast<const float *>(data));
    } else {
        pack_floats(*m, static_cast<const uint16_t *>(data));
    }
    return m.release();
}

void tc_matrix_free(tc_matrix *m) { delete m; }

int64_t tc_matrix_bytes(const tc_matrix *m) {
    return static_cast<int64_t>(m->data.size + 2 * (m->scales.size + m->minima.size + m->negated_sums.size));
}

void tc_matrix_row(const tc_matrix *m, int64_t row, float *out) { dequantise_row(*m, row, out); }

void tc_matrix_apply(const tc_matrix *m, int bits, const float *x, int64_t rows, float *out) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    path->apply(*m, bits, x, rows, out, team());
}

tc_model *tc_model_new(const tc_shape *shape, int bits, const tc_matrix *embedding) {
    auto *model = new tc_model;
    model->shape = *shape;
    model->bits = bits;
    model->embedding = embedding;
    return model;
}

void tc_model_free(tc_model *model) { delete model; }
void tc_model_add_layer(tc_model *model, const tc_layer *layer) { model->layers.push_back(*layer); }

void tc_model_set_combine(tc_model *model, const float *enorm, const float *hnorm, const tc_matrix *eh_proj) {
    model->enorm = enorm;
    model->hnorm = hnorm;
    model->eh_proj = eh_proj;
}

void tc_model_set_head(tc_model *model, const float *norm, const tc_matrix *head) {
    model->norm = norm;
    model->head = head;
}

uint64_t tc_read(const uint64_t *words, int64_t count) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    std::atomic<uint64_t> total{0};
    struct Context {
        const uint64_t *words;
        int64_t count;
        std::atomic<uint64_t> &total;
    } context{words, count, total};
    team().run([](void *c, int thread, int threads) {
        auto &it = *static_cast<Context *>(c);
        uint64_t sums[8] = {};
        const int64_t lines = it.count / 8, end = lines * (thread + 1) / threads;
        for (int64_t line = lines * thread / threads; line < end; line++) {
            const uint64_t *from = it.words + line * 8;
            __builtin_prefetch(from + 1024);
            for (int i = 0; i < 8; i++) sums[i] += from[i];
        }
        for (const uint64_t sum : sums) it.total += sum;
    }, &context);
    return total;
}

void tc_model_run(tc_model *model, const tc_step *step) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    path->run(*model, *step, team());
}

void tc_chain_run(const tc_chain *chain, const tc_step *step) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    const size_t size = step->rows * chain->layers[0]->shape.hidden;
    std::vector<float> hidden[2] = {std::vector<float>(size), std::vector<float>(size)};
    tc_step one = *step;
    one.token_ids = chain->token_ids;
    one.logits = nullptr;
    for (int64_t i = 0; i < chain->depth; i++) {
        // One token to the left: each request's last row takes the next known token, else the newest draft.
        std::copy(chain->token_ids + 1, chain->token_ids + step->rows, chain->token_ids);
        int64_t *drafts = chain->drafts + i * step->wanted;
        for (int64_t w = 0; w < step->wanted; w++) {
            const int64_t known = chain->known[i * step->wanted + w];
            chain->token_ids[step->wanted_rows[w]] = known >= 0 || i == 0 ? known : drafts[w - step->wanted];
        }
        one.target_hidden = chain->is_chained && i > 0 ? hidden[(i - 1) % 2].data() : step->target_hidden;
        one.hidden = hidden[i % 2].data();
        one.keys = chain->keys + i;
        one.values = chain->values + i;
        one.best = drafts;
        one.confidence = chain->confidence + i * step->wanted;
        path->run(*chain->layers[i], one, team());
        for (int64_t w = 0; w < step->wanted; w++) drafts[w] = drafts[w] < 0 ? 0 : chain->target_ids[drafts[w]];
        chain->end_ns[i] = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }
}

}  // extern "C"
