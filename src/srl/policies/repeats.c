/* Which patches of a batch of images are different (images.py): games repeat themselves, from place to place and from
 * image to image. Every patch gets a number; patches that are equal, byte by byte, get the same one. The patches of a
 * layer are told apart by the numbers of the layer below. */
#include "repeats.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define BLOCK 4 /* pixels: the step of the first layer, half of its window */
#define LONGEST 64 /* words that tell a patch */

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

static inline __attribute__((always_inline)) int same(const uint32_t *one, const uint32_t *two, int64_t words) {
    uint32_t differ = 0;
    for (int64_t at = 0; at < words; at++) differ |= one[at] ^ two[at];
    return !differ;
}

/* Patches that are looked up together: where they are kept is far away, so it is asked for in time. */
enum { GROUP = 96 };
typedef struct {
    int64_t count;
    uint32_t *to[GROUP]; /* where their numbers go */
    uint64_t slots[GROUP];
    uint32_t patches[GROUP * LONGEST];
} Group;

/* Numbers for all of the group. 0: there are too many different ones. */
static inline __attribute__((always_inline)) int look_up(Seen *seen, Group *group, int64_t words) {
    for (int64_t i = 0; i < group->count; i++) {
        const uint32_t found = seen->table[group->slots[i]];
        const char *kept = (const char *)(seen->kept + (found ? found - 1 : seen->count) * words);
        __builtin_prefetch(kept), __builtin_prefetch(kept + words * 4 - 4);
    }
    for (int64_t i = 0; i < group->count; i++) {
        const uint32_t *patch = group->patches + i * words;
        if (i && same(patch - words, patch, words)) {
            *group->to[i] = *group->to[i - 1];
            continue;
        }
        uint64_t slot = group->slots[i];
        while (seen->table[slot] && !same(seen->kept + (seen->table[slot] - 1) * words, patch, words))
            slot = (slot + 1) & seen->mask;
        if (!seen->table[slot]) {
            if (seen->count == seen->most) return 0;
            memcpy(seen->kept + seen->count * words, patch, (size_t)words * sizeof *patch);
            seen->table[slot] = (uint32_t)++seen->count;
        }
        *group->to[i] = seen->table[slot] - 1;
    }
    group->count = 0;
    return 1;
}

/* Have the group's next patch, which is written already, looked up. 0: there are too many different ones. */
static inline __attribute__((always_inline)) int add(Seen *seen, Group *group, int64_t words, uint32_t *to) {
    const uint32_t *patch = group->patches + group->count * words;
    uint64_t one = 0x9E3779B97F4A7C15u, two = 0xC2B2AE3D27D4EB4Fu;
    int64_t at = 0;
    for (; at + 4 <= words; at += 4) {
        uint64_t pair[2];
        memcpy(pair, patch + at, sizeof pair);
        one = (one ^ pair[0]) * 0xff51afd7ed558ccdu, two = (two ^ pair[1]) * 0xc4ceb9fe1a85ec53u;
        one ^= one >> 29, two ^= two >> 31;
    }
    for (; at < words; at++) one = (one ^ patch[at]) * 0xff51afd7ed558ccdu, one ^= one >> 29;
    const uint64_t slot = (one + two) * 0x9E3779B97F4A7C15u >> 20 & seen->mask;
    __builtin_prefetch(seen->table + slot);
    group->slots[group->count] = slot, group->to[group->count++] = to;
    return group->count < GROUP || look_up(seen, group, words);
}

/* Which places of a row have changed: that at x has bit x * apart. */
typedef uint64_t Row;
enum { MOST = 64 }; /* rows and places of a row for which that is known */

/* Which windows of `size` places that move on by `step` have changed. */
static inline __attribute__((always_inline)) void follow(const Row *below, Row *changed, int64_t height, int64_t apart,
                                                         int64_t size, int64_t step) {
    for (int64_t y = 0; y + size <= height; y += step) {
        Row rows = 0, found = 0;
        for (int64_t row = 0; row < size; row++) rows |= below[y + row];
        for (int64_t column = 0; column < size; column++) found |= rows >> column * apart;
        *changed++ = found;
    }
}

/* An image's layer whose windows of size x size numbers move on by step, where they have changed (NULL: everywhere). 0: there
 * are too many different ones. */
static inline __attribute__((always_inline)) int layer(Seen *seen, Group *group, const uint32_t *from, uint32_t *to,
                                                       const Row *changed, int64_t apart, int64_t height, int64_t width,
                                                       int64_t size, int64_t step) {
    for (int64_t y = 0; y + size <= height; y += step)
        for (int64_t x = 0; x + size <= width; x += step, to++) {
            if (changed && !(changed[y / step] >> x * apart & 1)) continue;
            uint32_t *patch = group->patches + group->count * size * size;
            for (int64_t row = 0; row < size; row++)
                memcpy(patch + row * size, from + (y + row) * width + x, (size_t)size * sizeof *patch);
            if (!add(seen, group, size * size, to)) return 0;
        }
    return look_up(seen, group, size * size);
}

typedef uint32_t Pixels __attribute__((aligned(1), may_alias)); /* of a row of a block */

/* Where the rows of pixels of a row of blocks differ from those before. */
static inline __attribute__((always_inline)) Row differ(const uint8_t *from, const uint8_t *before, int64_t channels,
                                                        int64_t area, int64_t width) {
    uint32_t any[MOST] = {0};
    const int64_t blocks = width / BLOCK;
    Row changed = 0;
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t row = 0; row < BLOCK; row++) {
            const Pixels *now = (const Pixels *)(from + channel * area + row * width);
            const Pixels *then = (const Pixels *)(before + channel * area + row * width);
            for (int64_t x = 0; x < blocks; x++) any[x] |= now[x] ^ then[x];
        }
    for (int64_t x = 0; x < blocks; x++) changed |= (Row)(any[x] != 0) << x;
    return changed;
}

static inline __attribute__((always_inline)) int blocks(Seen *seen, Group *group, const uint8_t *from, uint32_t *to,
                                                        const Row *changed, int64_t channels, int64_t height,
                                                        int64_t width) {
    const int64_t words = channels * BLOCK;
    for (int64_t y = 0; y + BLOCK <= height; y += BLOCK)
        for (int64_t x = 0; x + BLOCK <= width; x += BLOCK, to++) {
            if (changed && !(changed[y / BLOCK] >> x / BLOCK & 1)) continue;
            if (!changed && x % 64 == 0) /* the blocks below, in time */
                for (int64_t row = BLOCK; row < 2 * BLOCK; row++)
                    for (int64_t channel = 0; channel < channels; channel++)
                        __builtin_prefetch(from + (channel * height + y + row) * width + x);
            uint32_t *patch = group->patches + group->count * words;
            for (int64_t channel = 0; channel < channels; channel++)
                for (int64_t row = 0; row < BLOCK; row++)
                    memcpy(patch + channel * BLOCK + row, from + (channel * height + y + row) * width + x, BLOCK);
            if (!add(seen, group, words, to)) return 0;
        }
    return look_up(seen, group, words);
}

uint64_t repeats_slots(int64_t most) {
    uint64_t found = 64;
    while (found < 2 * (uint64_t)most) found *= 2;
    return found;
}

void repeats_sizes(int64_t images, int64_t height, int64_t width, int64_t *places) {
    const int64_t h = height / BLOCK, w = width / BLOCK, h2 = (h - 5) / 2 + 1, w2 = (w - 5) / 2 + 1;
    places[0] = images * h * w, places[1] = images * (h - 1) * (w - 1), places[2] = images * h2 * w2;
    places[3] = images * (h2 - 2) * (w2 - 2);
}

FAST int repeats_more(Seen *seen, const uint8_t *from, uint8_t *before, int64_t known, int64_t images, int64_t channels,
                      int64_t height, int64_t width, uint32_t *const *to) {
    const int64_t h = height / BLOCK, w = width / BLOCK, h2 = (h - 5) / 2 + 1, w2 = (w - 5) / 2 + 1, area = height * width;
    int64_t places[REPEATS_LAYERS];
    Row changed[REPEATS_LAYERS][MOST];
    Group group;
    group.count = 0;
    repeats_sizes(1, height, width, places);
    for (int64_t image = 0; image < images; image++, from += channels * area) {
        uint32_t *at[REPEATS_LAYERS];
        for (int each = 0; each < REPEATS_LAYERS; each++) at[each] = to[each] + image * places[each];
        uint8_t *own = before ? before + image * channels * area : 0;
        const uint8_t *like = image < known ? own : own || !image ? 0 : from - channels * area;
        const Row *where[REPEATS_LAYERS] = {0};
        if (like && h <= MOST && w <= MOST) {
            for (int64_t y = 0; y < h; y++) {
                const int64_t place = y * BLOCK * width;
                changed[0][y] = differ(from + place, like + place, channels, area, width);
                for (int64_t channel = 0; own && changed[0][y] && channel < channels; channel++)
                    memcpy(own + channel * area + place, from + channel * area + place, (size_t)(BLOCK * width));
            }
            follow(changed[0], changed[1], h, 1, 2, 1);
            follow(changed[1], changed[2], h - 1, 1, 4, 2);
            follow(changed[2], changed[3], h2, 2, 3, 1);
            for (int each = 0; each < REPEATS_LAYERS; each++) {
                where[each] = changed[each];
                if (!own) memcpy(at[each], at[each] - places[each], (size_t)places[each] * sizeof **at);
            }
        } else if (own) memcpy(own, from, (size_t)(channels * area));
        const int fine = channels == 4 ? blocks(&seen[0], &group, from, at[0], where[0], 4, height, width)
                                       : blocks(&seen[0], &group, from, at[0], where[0], channels, height, width);
        if (!(fine && layer(&seen[1], &group, at[0], at[1], where[1], 1, h, w, 2, 1) &&
              layer(&seen[2], &group, at[1], at[2], where[2], 1, h - 1, w - 1, 4, 2) &&
              layer(&seen[3], &group, at[2], at[3], where[3], 2, h2, w2, 3, 1)))
            return 0;
    }
    return 1;
}

/* The patches of the three layers of images of bytes [images][channels][height][width], and of the blocks below them.
 * kept: the different blocks as bytes and patches as numbers of the layer below, of each at most `most`; counts: how
 * many there are; last: the numbers of the last layer, image by image. 0: it is not worth while, or no memory. */
int repeats_find(const uint8_t *from, int64_t images, int64_t channels, int64_t height, int64_t width,
                 uint32_t *const *kept, const int64_t *most, int64_t *counts, uint32_t *last) {
    static const int64_t words[REPEATS_LAYERS] = {0, 4, 16, 9};
    Seen seen[REPEATS_LAYERS];
    int64_t places[REPEATS_LAYERS];
    uint64_t all = 0;
    if (channels * BLOCK > LONGEST) return 0;
    repeats_sizes(images, height, width, places);
    for (int at = 0; at < REPEATS_LAYERS; at++) all += repeats_slots(most[at]);
    uint32_t *table = reserve((size_t)(all + (uint64_t)(places[0] + places[1] + places[2])) * sizeof *table), *next = table;
    if (!table) return 0;
    memset(table, 0, all * sizeof *table);
    for (int at = 0; at < REPEATS_LAYERS; at++) {
        const uint64_t own = repeats_slots(most[at]);
        seen[at] = (Seen){kept[at], at ? words[at] : channels * BLOCK, 0, most[at], next, own - 1};
        next += own;
    }
    uint32_t *const to[REPEATS_LAYERS] = {next, next + places[0], next + places[0] + places[1], last};
    const int fine = repeats_more(seen, from, 0, 0, images, channels, height, width, to);
    for (int at = 0; at < REPEATS_LAYERS; at++) counts[at] = seen[at].count;
    return fine;
}
