/* Calls the kernel that it is linked with, as it is told on its standard input; who asks judges what comes back.

   LOAD: n, m, the lengths of w and y, and x (n * m) and w as floats; no answer.
   RUN:  a count, and so many pairs (a, b); the answer is so many times y, each with its guard behind it.

   Nothing here is trusted: the kernel is part of this process and may do to it what it likes. Before each call y is filled
   with NaN and what lies behind it with a, which comes back too; x and w are followed by NaN: a kernel that reads or
   writes one place too far gives itself away. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum { LOAD = 1, RUN = 2, GUARD = 16 };

void kernel(int n, int m, float a, float b, const float *x, const float *w, float *y);

static void take(void *to, size_t size)
{
    for (char *at = to; size > 0;) {
        ssize_t got = read(0, at, size);
        if (got <= 0)
            _exit(got < 0);
        at += got;
        size -= (size_t)got;
    }
}

static void give(const void *from, size_t size)
{
    for (const char *at = from; size > 0;) {
        ssize_t put = write(1, at, size);
        if (put <= 0)
            _exit(1);
        at += put;
        size -= (size_t)put;
    }
}

static float *room(size_t count)
{
    float *floats = malloc((count + GUARD) * sizeof(float));
    if (floats == NULL)
        _exit(1);
    for (size_t i = 0; i < count + GUARD; i++)
        floats[i] = NAN;
    return floats;
}

int main(void)
{
    int32_t command[5] = {0};
    float *x = NULL, *w = NULL, *y = NULL;
    for (int32_t n = 0, m = 0, length = 0;;) {
        take(command, sizeof command);
        if (command[0] == LOAD) {
            free(x), free(w), free(y);
            n = command[1], m = command[2], length = command[4];
            x = room((size_t)n * m), w = room((size_t)command[3]), y = room((size_t)length);
            take(x, sizeof(float) * n * m);
            take(w, sizeof(float) * command[3]);
        } else if (command[0] == RUN) {
            for (int32_t round = 0; round < command[1]; round++) {
                float ab[2];
                take(ab, sizeof ab);
                for (int32_t i = 0; i < length + GUARD; i++)
                    y[i] = i < length ? NAN : ab[0];
                kernel(n, m, ab[0], ab[1], x, w, y);
                give(y, sizeof(float) * (length + GUARD));
            }
        } else {
            _exit(2);
        }
    }
}
