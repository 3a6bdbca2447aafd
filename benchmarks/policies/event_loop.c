/* A queue served in batches by a table, one event after another. It shares nothing with Weir: what the computations
   and the simulation of Weir are held against. See event_loop.py. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct { uint64_t s[4]; } Random;

/* xoshiro256++ of Blackman and Vigna, seeded by splitmix64 */
static uint64_t turned(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

static uint64_t next(Random *r) {
    uint64_t *s = r->s, result = turned(s[0] + s[3], 23) + s[0], t = s[1] << 17;
    s[2] ^= s[0]; s[3] ^= s[1]; s[1] ^= s[2]; s[0] ^= s[3]; s[2] ^= t; s[3] = turned(s[3], 45);
    return result;
}

static void seed(Random *r, uint64_t x) {
    for (int i = 0; i < 4; i++) {
        uint64_t z = (x += 0x9e3779b97f4a7c15ULL);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        r->s[i] = z ^ (z >> 31);
    }
}

static double uniform(Random *r) { return ((double)(next(r) >> 11) + 0.5) * 0x1p-53; }
static double exponential(Random *r) { return -log(uniform(r)); }

static double normal(Random *r) { /* Box and Muller */
    return sqrt(2.0 * exponential(r)) * cos(6.283185307179586 * uniform(r));
}

static double gamma_of(Random *r, double shape) { /* Marsaglia and Tsang */
    if (shape < 1.0) return gamma_of(r, shape + 1.0) * pow(uniform(r), 1.0 / shape);
    double d = shape - 1.0 / 3.0, c = 1.0 / sqrt(9.0 * d);
    for (;;) {
        double x = normal(r), v = 1.0 + c * x;
        if (v <= 0.0) continue;
        v = v * v * v;
        if (log(uniform(r)) < 0.5 * x * x + d - d * v + d * log(v)) return d * v;
    }
}

static int later(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A function of the line's length n, of which only its mean change by a decision is needed: known one by one up to `top`,
   and a straight line in n beyond. Over many decisions these changes are nothing on the mean, whatever the function is. */
typedef struct { int top; const double *drift, *first, *slope; } Controls;

static double drift(const Controls *c, int which, long n) {
    return n <= c->top ? c->drift[which * (c->top + 1) + n] : c->first[which] + c->slope[which] * (n - c->top);
}

/* Serve `parts` stretches of `rows` rows each, after `warm` rows that do not count. Of each stretch: the mean response
   time, the mean power over the time from its first batch to its last, the `share` quantile of the response time (unless
   that is 0), and the share of the rows that took longer than each of `limits`; and `sharp`, three sums over its decisions:
   what the rows in the system and the energy cost, both but for what is mean zero and known, and the mean time. Returns 0,
   or 1 where memory is short. */
int serve(int largest, const double *time, const double *energy, const double *cv, int entries, const int *table,
          double rate, long warm, long rows, int parts, double share, int limited, const double *limits, uint64_t number,
          int top, const double *drifts, const double *firsts, const double *slopes,
          double *means, double *powers, double *quantiles, double *later_than, double *sharp) {
    Random r;
    Controls controls = {top, drifts, firsts, slopes};
    seed(&r, number);
    long size = 1024, mask = size - 1, head = 0, tail = 0; /* waiting: the instants [head, tail) */
    double *waiting = malloc(size * sizeof(double)), *times = malloc((rows + largest) * sizeof(double));
    if (!waiting || !times) return 1;
    double now = 0.0, coming = exponential(&r) / rate;
    for (int part = -1; part < parts; part++) {
        long done = 0, wanted = part < 0 ? warm : rows;
        double began = now, spent = 0.0, sum = 0.0, expected = 0.0, area = 0.0, moved[2] = {0.0, 0.0};
        while (done < wanted) {
            long n = tail - head;
            int batch = table[n < entries ? n : entries - 1];
            double until = coming, mean = 1.0 / rate, taken = mean, square = 0.0;
            if (batch) {
                double v = cv[batch - 1];
                mean = time[batch - 1];
                taken = v > 0.0 ? mean * v * v * gamma_of(&r, 1.0 / (v * v)) : mean;
                until = now + taken;
                square = rate * (1.0 + v * v) * mean * mean / 2.0; /* rows · ms of those who come during the batch */
                spent += energy[batch - 1];
            }
            double sooner = 0.0;
            long come = 0;
            while (coming <= until) {
                if (tail - head == size) {
                    double *more = malloc(2 * size * sizeof(double));
                    if (!more) return 1;
                    for (long i = head; i < tail; i++) more[i & (2 * size - 1)] = waiting[i & mask];
                    free(waiting);
                    waiting = more; size *= 2; mask = size - 1;
                }
                waiting[tail++ & mask] = coming;
                come++;
                sooner += until - coming;
                coming += exponential(&r) / rate;
                if (!batch) break;
            }
            now = until;
            if (top >= 0) {
                /* n rows for the mean time; of those who come, how much their instants differ from even ones */
                area += n * mean + square + (batch ? sooner - come * taken / 2.0 : 0.0);
                expected += mean;
                for (int which = 0; which < 2; which++) moved[which] += drift(&controls, which, n);
            }
            for (int i = 0; i < batch; i++) {
                double response = now - waiting[head++ & mask];
                if (part >= 0) { times[done] = response; sum += response; }
                done++;
            }
        }
        if (part < 0) continue;
        means[part] = sum / done;
        powers[part] = spent / (now - began);
        sharp[3 * part] = area / rate + moved[0];
        sharp[3 * part + 1] = spent + moved[1];
        sharp[3 * part + 2] = expected;
        for (int i = 0; i < limited; i++) {
            long late = 0;
            for (long j = 0; j < done; j++) late += times[j] > limits[i];
            later_than[part * limited + i] = (double)late / done;
        }
        if (share > 0.0) {
            qsort(times, done, sizeof(double), later);
            quantiles[part] = times[(long)ceil(share * done) - 1];
        }
    }
    free(waiting); free(times);
    return 0;
}

/* Functions of the work w of several workers: what is left of their batches, and `row` ms for each row that waits. The first is
   w itself, the others are the squares of what is above each of `from`. Of each, its mean change by all that happens, given what
   is known before: over a long time these changes are nothing on the mean, whatever the tables are. */
typedef struct { int count; const double *from; double row, rate; } Bends;

static double bent(double x) { return x > 0.0 ? x * x : 0.0; }
static double cubed(double x) { return x > 0.0 ? x * x * x / 3.0 : 0.0; }

/* For `span` ms `busy` workers work, and rows may arrive; `work` is there at first. */
static void pass(const Bends *b, double work, int busy, double span, double *changes) {
    double less = busy * span;
    changes[0] += b->row * b->rate * span - less;
    for (int i = 0; i < b->count; i++) {
        double x = work - b->from[i], y = x - less;
        if (x + b->row <= 0.0) continue;
        if (y >= 0.0) {
            changes[i + 1] -= less * (x + y);
            changes[i + 1] += b->rate * b->row * span * (x + y + b->row);
        } else {
            changes[i + 1] += bent(y) - bent(x);
            changes[i + 1] += b->rate * (busy ? (cubed(x + b->row) - cubed(y + b->row) - cubed(x) + cubed(y)) / busy
                                              : span * (bent(x + b->row) - bent(x)));
        }
    }
}

/* A batch of `size` rows begins, whose time is `mean` with the coefficient of variation `v`; it takes `taken`. */
static void begin(const Bends *b, double work, int size, double mean, double v, double taken, double *changes) {
    changes[0] += mean - b->row * size;
    for (int i = 0; i < b->count; i++) {
        double x = work - b->from[i], y = x - b->row * size;
        changes[i + 1] -= bent(x);
        changes[i + 1] += y >= 0.0 ? y * y + 2.0 * y * mean + (1.0 + v * v) * mean * mean : bent(y + taken);
    }
}

/* Several workers on one queue. `tables` has a row for each number of idle workers, 1 to `workers`, of `entries` numbers: how
   many rows to dispatch by the rows that wait, 0 for none. Each event is an arrival or the end of a batch. Serve `warm` rows
   that do not count, then `parts` stretches of `rows` rows each. Results as in `serve`, but for the sharper ones. Rows arrive
   at the same instants whatever the tables are: service times have a generator of their own. Of each stretch `sharp` has the
   mean number of rows in the system, and the mean changes of the functions of the work above each of `from`, per ms. */
int serve_several(int workers, int largest, const double *time, const double *energy, const double *cv, int entries,
                  const int *tables, double rate, long warm, long rows, int parts, double share, int limited,
                  const double *limits, uint64_t number, int count, const double *from, double row, double *means,
                  double *powers, double *quantiles, double *later_than, double *sharp) {
    Random r, services;
    Bends bends = {count, from, row, rate};
    seed(&r, number);
    seed(&services, ~number);
    long size = 1024, mask = size - 1, head = 0, tail = 0;
    double *waiting = malloc(size * sizeof(double)), *times = malloc((rows + largest) * sizeof(double));
    double *busy = calloc(workers, sizeof(double)), *changes = malloc((count + 1) * sizeof(double));
    if (!waiting || !times || !busy || !changes) return 1;
    double now = 0.0, coming = exponential(&r) / rate;
    for (int part = -1; part < parts; part++) {
        long done = 0, wanted = part < 0 ? warm : rows;
        double began = now, spent = 0.0, sum = 0.0, area = 0.0, work = row * (tail - head);
        for (int w = 0; w < workers; w++) if (busy[w] > now) work += busy[w] - now;
        for (int i = 0; i <= count; i++) changes[i] = 0.0;
        while (done < wanted) {
            int idle = 0, first = -1;
            double sooner = coming;
            for (int w = 0; w < workers; w++) {
                if (busy[w] <= now) { idle++; first = w; }
                else if (busy[w] < sooner) sooner = busy[w];
            }
            long n = tail - head;
            int batch = idle ? tables[(idle - 1) * entries + (n < entries ? n : entries - 1)] : 0;
            if (!batch) {
                if (count) {
                    area += n * (sooner - now);
                    pass(&bends, work, workers - idle, sooner - now, changes);
                    work -= (workers - idle) * (sooner - now);
                }
                now = sooner;
                if (now == coming) {
                    if (tail - head == size) {
                        double *more = malloc(2 * size * sizeof(double));
                        if (!more) return 1;
                        for (long i = head; i < tail; i++) more[i & (2 * size - 1)] = waiting[i & mask];
                        free(waiting);
                        waiting = more; size *= 2; mask = size - 1;
                    }
                    waiting[tail++ & mask] = coming;
                    work += row;
                    coming += exponential(&r) / rate;
                }
                continue;
            }
            double v = cv[batch - 1], mean = time[batch - 1];
            double taken = v > 0.0 ? mean * v * v * gamma_of(&services, 1.0 / (v * v)) : mean;
            if (count) {
                area += batch * mean;
                begin(&bends, work, batch, mean, v, taken, changes);
                work += taken - row * batch;
            }
            busy[first] = now + taken;
            spent += energy[batch - 1];
            for (int i = 0; i < batch; i++) {
                double response = busy[first] - waiting[head++ & mask];
                if (part >= 0) { times[done] = response; sum += response; }
                done++;
            }
        }
        if (part < 0) continue;
        means[part] = sum / done;
        powers[part] = spent / (now - began);
        if (count) {
            double *own = sharp + part * (count + 2);
            own[0] = area / (now - began);
            for (int i = 0; i <= count; i++) own[i + 1] = changes[i] / (now - began);
        }
        for (int i = 0; i < limited; i++) {
            long late = 0;
            for (long j = 0; j < done; j++) late += times[j] > limits[i];
            later_than[part * limited + i] = (double)late / done;
        }
        if (share > 0.0) {
            qsort(times, done, sizeof(double), later);
            quantiles[part] = times[(long)ceil(share * done) - 1];
        }
    }
    free(waiting); free(times); free(busy); free(changes);
    return 0;
}

/* The best table for one worker, or what a given one costs, by plain policy iteration on queues of up to `top` rows; who
   arrives beyond that is lost, which costs more than to be served: else never to serve would be best. `law` is [size - 1][k], the probability that k rows arrive during a batch, k up to `top`. The
   cost per ms is `price` for each row present plus `weight` times the energy. `actions` has top + 1 entries and is both the
   start and the result; with `steps` 0 it is only evaluated. Returns the cost, or -1 where memory is short. */
double plan(int largest, const double *time, const double *energy, const double *cv, const double *law, double rate,
            int top, double price, double weight, int steps, int *actions) {
    int n = top + 1;
    double *a = malloc(sizeof(double) * n * (n + 1)), *h = malloc(sizeof(double) * n), gain = -1.0;
    int *reach = malloc(sizeof(int) * (largest + 1)); /* more arrivals than this have no probability */
    if (!a || !h || !reach) return -1.0;
    double loss = 0.0; /* of a row */
    for (int b = 1; b <= largest; b++) loss = fmax(loss, 10.0 * (weight * energy[b - 1] + price * top * time[b - 1]));
    for (int b = 1; b <= largest; b++) {
        reach[b] = n;
        while (reach[b] > 1 && law[(long)(b - 1) * n + reach[b] - 1] < 1e-18) reach[b]--;
    }
    for (int step = 0;; step++) {
        /* Unknowns: the values of 1 ... top in the columns 0 ... top - 1 (that of an empty queue is 0), and the gain in column
           `top`. A batch takes at most `largest` rows away, so below the diagonal no more columns than that are filled. */
        for (int s = 0; s < n; s++) {
            double *row = a + (long)s * (n + 1);
            for (int j = 0; j <= n; j++) row[j] = 0.0;
            int b = actions[s];
            if (s) row[s - 1] += 1.0;
            if (!b) {
                row[s < top ? s : top - 1] -= 1.0;
                row[top] = 1.0 / rate;
                row[n] = price * s / rate + (s == top ? loss : 0.0);
                continue;
            }
            const double *come = law + (long)(b - 1) * n;
            double t = time[b - 1], v = cv[b - 1], left = 1.0, lost = s - b + rate * t - top;
            for (int k = 0; k < reach[b] && s - b + k < top; k++) {
                if (s - b + k) row[s - b + k - 1] -= come[k];
                left -= come[k];
                lost += come[k] * (top - (s - b + k));
            }
            row[top - 1] -= left;
            row[top] = t;
            row[n] = price * (s * t + rate * (1.0 + v * v) * t * t / 2.0) + weight * energy[b - 1] + loss * fmax(lost, 0.0);
        }
        for (int i = 0; i < n; i++) {
            int best = i, last = i + largest + 1 < n - 1 ? i + largest + 1 : n - 1;
            for (int j = i + 1; j <= last; j++) if (fabs(a[(long)j * (n + 1) + i]) > fabs(a[(long)best * (n + 1) + i])) best = j;
            double *top_row = a + (long)i * (n + 1), *other = a + (long)best * (n + 1);
            if (best != i) for (int j = i; j <= n; j++) { double x = top_row[j]; top_row[j] = other[j]; other[j] = x; }
            for (int j = i + 1; j <= last; j++) {
                double *row = a + (long)j * (n + 1), f = row[i] / top_row[i];
                if (f != 0.0) for (int k = i; k <= n; k++) row[k] -= f * top_row[k];
            }
        }
        for (int i = n - 1; i >= 0; i--) { /* h[i + 1] is the value of i + 1 rows; the last unknown is the gain */
            double x = a[(long)i * (n + 1) + n];
            if (i < top) x -= a[(long)i * (n + 1) + top] * gain;
            for (int j = i + 1; j < top; j++) x -= a[(long)i * (n + 1) + j] * h[j + 1];
            x /= a[(long)i * (n + 1) + i];
            if (i == top) gain = x; else h[i + 1] = x;
        }
        h[0] = 0.0;
        if (step >= steps) break;
        int changed = 0;
        for (int s = 0; s < n; s++) {
            double least = 1e300, own = 1e300;
            int best = 0;
            for (int b = 0; b <= largest && b <= s; b++) {
                double c;
                if (!b) {
                    if (s == top) continue;
                    c = (price * s - gain) / rate + h[s + 1];
                } else {
                    const double *come = law + (long)(b - 1) * n;
                    double t = time[b - 1], v = cv[b - 1], left = 1.0, lost = s - b + rate * t - top;
                    c = price * (s * t + rate * (1.0 + v * v) * t * t / 2.0) + weight * energy[b - 1] - gain * t;
                    for (int k = 0; k < reach[b] && s - b + k < top; k++) {
                        c += come[k] * h[s - b + k];
                        left -= come[k];
                        lost += come[k] * (top - (s - b + k));
                    }
                    c += left * h[top] + loss * fmax(lost, 0.0);
                }
                if (b == actions[s]) own = c;
                if (c < least) { least = c; best = b; }
            }
            if (least < own - 1e-10 * (1.0 + fabs(own))) { actions[s] = best; changed = 1; }
        }
        if (!changed) break;
    }
    free(a); free(h); free(reach);
    return gain;
}
