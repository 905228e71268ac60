/* Which patches of a batch of images are different (images.py): games repeat themselves, from place to place and from
 * image to image. Every patch gets a number; patches that are equal, byte by byte, get the same one. The patches of a
 * layer are told apart by the numbers of the layer below. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define BLOCK 4 /* pixels: the step of the first layer, half of its window */
#define LONGEST 64 /* words that tell a patch */

/* The different patches of a layer, each told by `words` numbers. */
typedef struct {
    uint32_t *kept;
    int64_t words, count, most;
    uint32_t *table; /* number + 1, or 0 */
    uint64_t mask;
    uint64_t last;
} Seen;

/* Memory of a thread for what is not handed on; grows as it must. */
static __thread struct {
    void *memory;
    size_t bytes;
} scratch;

static void *reserve(size_t bytes) {
    if (bytes > scratch.bytes) {
        free(scratch.memory);
        scratch.memory = malloc(bytes);
        scratch.bytes = scratch.memory ? bytes : 0;
    }
    return scratch.memory;
}

static inline __attribute__((always_inline)) int64_t number(Seen *seen, const uint32_t *patch, int64_t words) {
    const size_t bytes = (size_t)words * sizeof *patch;
    if (seen->count && !memcmp(seen->kept + seen->last * words, patch, bytes)) return (int64_t)seen->last;
    uint64_t one = 0x9E3779B97F4A7C15u, two = 0xC2B2AE3D27D4EB4Fu;
    int64_t at = 0;
    for (; at + 4 <= words; at += 4) {
        uint64_t pair[2];
        memcpy(pair, patch + at, sizeof pair);
        one = (one ^ pair[0]) * 0xff51afd7ed558ccdu, two = (two ^ pair[1]) * 0xc4ceb9fe1a85ec53u;
        one ^= one >> 29, two ^= two >> 31;
    }
    for (; at < words; at++) one = (one ^ patch[at]) * 0xff51afd7ed558ccdu, one ^= one >> 29;
    uint64_t slot = (one + two) * 0x9E3779B97F4A7C15u;
    for (slot = slot >> 20 & seen->mask;; slot = (slot + 1) & seen->mask) {
        const uint32_t found = seen->table[slot];
        if (found && memcmp(seen->kept + (found - 1) * words, patch, bytes)) continue;
        if (!found) {
            if (seen->count == seen->most) return -1;
            memcpy(seen->kept + seen->count * words, patch, bytes);
            seen->table[slot] = (uint32_t)++seen->count;
        }
        seen->last = seen->table[slot] - 1;
        return (int64_t)seen->last;
    }
}

/* A layer whose windows of size x size numbers move on by step. 0: there are too many different ones. */
static inline __attribute__((always_inline)) int layer(Seen *seen, const uint32_t *from, uint32_t *to, int64_t images,
                                                       int64_t height, int64_t width, int64_t size, int64_t step) {
    uint32_t patch[LONGEST];
    for (int64_t image = 0; image < images; image++, from += height * width)
        for (int64_t y = 0; y + size <= height; y += step)
            for (int64_t x = 0; x + size <= width; x += step) {
                for (int64_t row = 0; row < size; row++)
                    memcpy(patch + row * size, from + (y + row) * width + x, (size_t)size * sizeof *patch);
                const int64_t found = number(seen, patch, size * size);
                if (found < 0) return 0;
                *to++ = (uint32_t)found;
            }
    return 1;
}

static inline __attribute__((always_inline)) int blocks(Seen *seen, const uint8_t *from, uint32_t *to, int64_t images,
                                                        int64_t channels, int64_t height, int64_t width) {
    uint32_t patch[LONGEST];
    for (int64_t image = 0; image < images; image++, from += channels * height * width)
        for (int64_t y = 0; y + BLOCK <= height; y += BLOCK)
            for (int64_t x = 0; x + BLOCK <= width; x += BLOCK) {
                for (int64_t channel = 0; channel < channels; channel++)
                    for (int64_t row = 0; row < BLOCK; row++)
                        memcpy(patch + channel * BLOCK + row, from + (channel * height + y + row) * width + x, BLOCK);
                const int64_t found = number(seen, patch, channels * BLOCK);
                if (found < 0) return 0;
                *to++ = (uint32_t)found;
            }
    return 1;
}

static uint64_t slots(int64_t most) {
    uint64_t found = 64;
    while (found < 2 * (uint64_t)most) found *= 2;
    return found;
}

/* The patches of the three layers of images of bytes [images][channels][height][width], and of the blocks below them.
 * kept: the different blocks as bytes and patches as numbers of the layer below, of each at most `most`; counts: how
 * many there are; last: the numbers of the last layer, image by image. 0: it is not worth while, or no memory. */
FAST int repeats_find(const uint8_t *from, int64_t images, int64_t channels, int64_t height, int64_t width,
                      uint32_t *const *kept, const int64_t *most, int64_t *counts, uint32_t *last) {
    const int64_t h0 = height / BLOCK, w0 = width / BLOCK, h1 = h0 - 1, w1 = w0 - 1;
    const int64_t h2 = (h1 - 4) / 2 + 1, w2 = (w1 - 4) / 2 + 1;
    if (channels * BLOCK > LONGEST) return 0;
    uint64_t largest = 0;
    for (int at = 0; at < 4; at++)
        if (slots(most[at]) > largest) largest = slots(most[at]);
    uint32_t *table = reserve(((size_t)largest + (size_t)(images * (h0 * w0 + h1 * w1 + h2 * w2))) * sizeof *table);
    if (!table) return 0;
    uint32_t *first = table + largest, *second = first + images * h0 * w0, *third = second + images * h1 * w1;
    for (int at = 0; at < 4; at++) {
        Seen seen = {kept[at], 0, 0, most[at], table, slots(most[at]) - 1, 0};
        memset(table, 0, (seen.mask + 1) * sizeof *table);
        int fine;
        if (at == 0) fine = blocks(&seen, from, first, images, channels, height, width);
        else if (at == 1) fine = layer(&seen, first, second, images, h0, w0, 2, 1);
        else if (at == 2) fine = layer(&seen, second, third, images, h1, w1, 4, 2);
        else fine = layer(&seen, third, last, images, h2, w2, 3, 1);
        counts[at] = seen.count;
        if (!fine) return 0;
    }
    return 1;
}

/* to [patches][4][words of a block in bytes] as floats; patches as numbers of blocks */
FAST void repeats_pixels(const uint8_t *blocks, const uint32_t *patches, float *to, int64_t count, int64_t bytes) {
    for (int64_t at = 0; at < 4 * count; at++, to += bytes)
        for (int64_t byte = 0; byte < bytes; byte++) to[byte] = blocks[patches[at] * bytes + byte];
}

/* to [places][width] = the rows of from that the places name */
FAST void repeats_spread(const float *from, const uint32_t *places, float *to, int64_t count, int64_t width) {
    for (int64_t at = 0; at < count; at++, to += width)
        memcpy(to, from + places[at] * width, (size_t)width * sizeof *to);
}

/* from [places][width] added to the rows of to that the places name */
FAST void repeats_gather(const float *from, const uint32_t *places, float *to, int64_t count, int64_t width) {
    for (int64_t at = 0; at < count; at++, from += width) {
        float *row = to + places[at] * width;
        for (int64_t i = 0; i < width; i++) row[i] += from[i];
    }
}

/* The same with each image's places innermost: [images][width][places] */
FAST void repeats_spread_planes(const float *from, const uint32_t *places, float *to, int64_t images, int64_t each,
                                int64_t width) {
    for (int64_t image = 0; image < images; image++, places += each, to += each * width)
        for (int64_t at = 0; at < each; at++) {
            const float *row = from + places[at] * width;
            for (int64_t i = 0; i < width; i++) to[i * each + at] = row[i];
        }
}

FAST void repeats_gather_planes(const float *from, const uint32_t *places, float *to, int64_t images, int64_t each,
                                int64_t width) {
    for (int64_t image = 0; image < images; image++, places += each, from += each * width)
        for (int64_t at = 0; at < each; at++) {
            float *row = to + places[at] * width;
            for (int64_t i = 0; i < width; i++) row[i] += from[i * each + at];
        }
}
