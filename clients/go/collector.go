package tmc

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

const (
	mostItems   = 1000 // of one call
	mostBytes   = 1 << 20
	callTimeout = 30 * time.Second
)

// collector makes one call at a time of what any number of goroutines ask for: what is asked during a call goes together into
// the next one. Under load calls become large by themselves, and without load nothing waits.
type collector[Q proto.Message, A any] struct {
	ctx   context.Context
	asked chan *question[Q, A]
	call  func([]Q) ([]A, error)
}

type question[Q proto.Message, A any] struct {
	ctx    context.Context
	item   Q
	answer chan answer[A]
}

type answer[A any] struct {
	value A
	err   error
}

// collect starts a collector that lives as long as ctx. call: answers each item, or fails as a whole.
func collect[Q proto.Message, A any](ctx context.Context, call func([]Q) ([]A, error)) *collector[Q, A] {
	c := &collector[Q, A]{ctx: ctx, asked: make(chan *question[Q, A], mostItems), call: call}
	go c.run()
	return c
}

// ask returns the answer to an item. Its error says that nobody knows whether it was performed.
func (c *collector[Q, A]) ask(ctx context.Context, item Q) (A, error) {
	q, none := &question[Q, A]{ctx: ctx, item: item, answer: make(chan answer[A], 1)}, *new(A)
	select {
	case c.asked <- q:
	case <-ctx.Done():
		return none, context.Cause(ctx)
	case <-c.ctx.Done():
		return none, ErrClosed
	}
	select {
	case a := <-q.answer:
		return a.value, a.err
	case <-ctx.Done():
		return none, context.Cause(ctx)
	case <-c.ctx.Done():
		return none, ErrClosed
	}
}

func (c *collector[Q, A]) run() {
	for {
		var first *question[Q, A]
		select {
		case first = <-c.asked:
		case <-c.ctx.Done():
			return
		}
		c.answer(c.gather(first))
	}
}

// answer makes the call of a batch. One item that makes it malformed must not harm the others: then each goes alone.
func (c *collector[Q, A]) answer(batch []*question[Q, A]) {
	batch = slices.DeleteFunc(batch, func(q *question[Q, A]) bool { return q.ctx.Err() != nil }) // nobody waits for it
	if len(batch) == 0 {
		return
	}
	items := make([]Q, len(batch))
	for i, q := range batch {
		items[i] = q.item
	}
	values, err := c.call(items)
	if err == nil && len(values) != len(items) {
		err = &Error{Code: codes.Internal, Message: fmt.Sprintf("%d items got %d answers", len(items), len(values))}
	}
	if len(batch) > 1 && isMalformed(err) {
		for i := range batch {
			c.answer(batch[i : i+1 : i+1])
		}
		return
	}
	for i, q := range batch {
		if err != nil {
			q.answer <- answer[A]{err: err}
		} else {
			q.answer <- answer[A]{value: values[i]}
		}
	}
}

func isMalformed(err error) bool {
	var refusal *Error
	return errors.As(err, &refusal) && (refusal.Code == codes.Internal || refusal.Code == codes.InvalidArgument)
}

// gather returns the first question, and those that are there already.
func (c *collector[Q, A]) gather(first *question[Q, A]) []*question[Q, A] {
	batch, bytes := []*question[Q, A]{first}, proto.Size(first.item)
	for idle := 0; len(batch) < mostItems && bytes < mostBytes && idle < 2; {
		select {
		case q := <-c.asked:
			batch, bytes, idle = append(batch, q), bytes+proto.Size(q.item), 0
		default:
			idle++
			runtime.Gosched() // goroutines that were just answered ask for their next operation
		}
	}
	return batch
}
