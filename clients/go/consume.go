package tmc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	tmcv1 "tmc/v1"
)

// Copy is a message as a consumer gets it. It can come more than once: see Inbox.
type Copy struct {
	MessageID   string
	Topic, Key  string
	Producer    string
	Subscriber  string // APP.TAG of this app
	Body        []byte
	ContentType string
	Headers     map[string]string
	Attempt     int32
	Redelivered bool // another process may have begun it
	// Interval after which it comes again if nobody extends it. Consume does.
	Interval time.Duration
}

// OrderKey is that of an ordered topic, else "".
func (c *Copy) OrderKey() string { return c.Headers["tmc-order-key"] }

// Handler has the effect of a message. No error: it is acked. Reject and Later say what else becomes of it; with any other error
// or a panic it comes again by the subscription's policy. ctx ends when the message belongs to another run, or at the end of Grace.
type Handler func(ctx context.Context, m *Copy) error

// Consumer says what is consumed, and how.
type Consumer struct {
	// Handlers by topic.
	Handlers map[string]Handler
	// Workers is how many messages are handled at a time, of each queue if the center delivers through RabbitMQ; 0: 16.
	Workers int
	// Grace is how long handlers may take to end after ctx has ended, before their own ctx ends, too; 0: 10 s.
	Grace time.Duration
	// BrokerUser and BrokerPassword of this app at RabbitMQ, if the center delivers through it; "": guest.
	BrokerUser, BrokerPassword string
	// BrokerTLS is for a broker that the center says speaks TLS; nil: the system's certificate authorities.
	BrokerTLS *tls.Config
}

// Reject returns an error with which a handler says that this message will never succeed.
func Reject(err error) error {
	if err == nil {
		err = errors.New("it was rejected without a reason")
	}
	return &rejection{err}
}

// Later returns an error with which a handler asks for the message again after a time, of 100 ms to a day. It costs no retry.
func Later(after time.Duration) error {
	return &later{min(max(after, 100*time.Millisecond), 24*time.Hour)}
}

type rejection struct{ error }

func (r *rejection) Unwrap() error { return r.error }

type later struct{ after time.Duration }

func (l *later) Error() string { return fmt.Sprintf("later, after %s", l.after) }

func (c *Consumer) check() error {
	if len(c.Handlers) == 0 || c.Workers < 0 || c.Grace < 0 {
		return errors.New("tmc: a Consumer needs Handlers, and Workers and Grace that are not negative")
	}
	for topic, handler := range c.Handlers {
		if topic == "" || handler == nil {
			return fmt.Errorf("tmc: the handler of the topic %q is missing, or its topic", topic)
		}
	}
	return nil
}

// Consume hands messages to their handlers until ctx ends, and then waits for those that run. Its error is the cause of ctx's end,
// or says that the center refuses this consumer for good.
func (c *Client) Consume(ctx context.Context, consumer Consumer) error {
	if err := consumer.check(); err != nil {
		return err
	}
	if consumer.Workers == 0 {
		consumer.Workers = 16
	}
	if consumer.Grace == 0 {
		consumer.Grace = 10 * time.Second
	}
	answering, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	handling, hurry := context.WithCancel(answering)
	defer hurry()
	r := &receiver{
		client: c, consumer: consumer, ctx: answering, handling: handling, free: make(chan struct{}, consumer.Workers),
		acks: collect(answering, func(items []*tmcv1.AckRequest) ([]*tmcv1.AckResult, error) {
			return results(c.calling(answering), c.consumed.AckMany, &tmcv1.AckManyRequest{Items: items})
		}),
		nacks: collect(answering, func(items []*tmcv1.NackRequest) ([]*tmcv1.NackResult, error) {
			return results(c.calling(answering), c.consumed.NackMany, &tmcv1.NackManyRequest{Items: items})
		}),
		extends: collect(answering, func(items []*tmcv1.ExtendRequest) ([]*tmcv1.ExtendResult, error) {
			return results(c.calling(answering), c.consumed.ExtendMany, &tmcv1.ExtendManyRequest{Items: items})
		}),
	}
	for range consumer.Workers {
		r.free <- struct{}{}
	}
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(consumer.Grace, hurry)
		time.AfterFunc(consumer.Grace+answerWithin, end)
	})
	defer stop()
	if err := r.run(ctx); err != nil {
		return err
	}
	r.await(&r.busy)
	return context.Cause(ctx)
}

// await waits for what is handled, or until the handlers' time is over: one that does not end is left behind.
func (r *receiver) await(handled *sync.WaitGroup) {
	ended := make(chan struct{})
	go func() { handled.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-r.ctx.Done():
	}
}

// receiver is a Consumer at work.
type receiver struct {
	client   *Client
	consumer Consumer
	ctx      context.Context // of answers: ends after that of handlers
	handling context.Context // of handlers: ends after that of Consume
	busy     sync.WaitGroup  // messages that are handled
	free     chan struct{}   // workers that no stream has asked copies for
	acks     *collector[*tmcv1.AckRequest, *tmcv1.AckResult]
	nacks    *collector[*tmcv1.NackRequest, *tmcv1.NackResult]
	extends  *collector[*tmcv1.ExtendRequest, *tmcv1.ExtendResult]
}

func (r *receiver) describe(ctx context.Context) (*tmcv1.DescribeSubscriptionsResponse, error) {
	return repeated(ctx, r.client.log, func() (*tmcv1.DescribeSubscriptionsResponse, error) {
		ctx, cancel := context.WithTimeout(r.client.calling(ctx), callTimeout)
		defer cancel()
		plan, err := r.client.consumed.DescribeSubscriptions(ctx, &tmcv1.DescribeSubscriptionsRequest{})
		return plan, refused(err)
	})
}

const (
	lookEvery    = 5 * time.Second
	answerWithin = 2 * time.Second // for what handlers say when their time is over
)

// run receives from queues, or from the center itself, until ctx ends. It looks for subscriptions that are made later.
func (r *receiver) run(ctx context.Context) error {
	all, started, screen := sync.WaitGroup{}, map[string]bool{}, newScreen(r)
	defer all.Wait()
	for {
		asked := time.Now()
		plan, err := r.describe(ctx)
		switch {
		case err == nil:
		case len(started) == 0:
			return err
		default: // other queues are being read
			r.client.log.Error("tmc: subscriptions cannot be looked for", "error", err)
			if !sleep(ctx, lookEvery) {
				return nil
			}
			continue
		}
		if plan.Broker == nil {
			topics := slices.Collect(maps.Keys(r.consumer.Handlers))
			return r.connected(ctx, "the center", func() (bool, error) { return r.stream(ctx, topics) })
		}
		screen.learn(plan, asked)
		queues := map[string]string{} // by topic; "": its copies are forwarded to somewhere else
		for _, subscription := range plan.Subscriptions {
			queues[subscription.Topic] = subscription.Queue
		}
		missing := []string{}
		for topic := range r.consumer.Handlers {
			queue, found := queues[topic]
			if !found {
				missing = append(missing, topic)
			} else if queue != "" && !started[queue] {
				started[queue] = true
				reader := &queueReader{receiver: r, queue: queue, topic: topic, screen: screen, workers: make(chan struct{}, r.consumer.Workers)}
				all.Go(func() { _ = r.connected(ctx, queue, func() (bool, error) { return reader.read(ctx) }) })
			}
		}
		if len(missing) == 0 {
			return nil
		}
		r.client.log.Warn("tmc: there is no subscription yet: tmc admin subscribe TOPIC APP", "topics", missing)
		if !sleep(ctx, lookEvery) {
			return nil
		}
	}
}

// connected reads over one connection after the other until ctx ends, or the center finds the request malformed.
// read: returns whether anything came, and why it ended.
func (r *receiver) connected(ctx context.Context, from string, read func() (bool, error)) error {
	for pause := shortestPause; ctx.Err() == nil; pause = min(2*pause, longestPause) {
		got, err := read()
		if ctx.Err() != nil {
			return nil
		}
		if isMalformed(err) {
			return err
		}
		r.client.log.Warn("tmc: a connection for copies ended", "from", from, "error", err)
		if got {
			pause = shortestPause
		}
		sleep(ctx, pause)
	}
	return nil
}

// stream receives over one stream. A copy that came over an earlier one can still be answered. Returns: whether a copy came, and why it ended.
func (r *receiver) stream(ctx context.Context, topics []string) (got bool, err error) {
	ctx, cancel := context.WithCancel(r.client.calling(ctx))
	stream, err := r.client.consumed.Subscribe(ctx)
	if err != nil {
		cancel()
		return false, refused(err)
	}
	asked, asking := atomic.Int64{}, sync.WaitGroup{} // copies that may still come over this stream
	defer func() {
		cancel()
		asking.Wait()
		for range asked.Load() {
			r.free <- struct{}{}
		}
	}()
	asking.Go(func() {
		for request := (&tmcv1.SubscribeRequest{Topics: topics}); ; request = new(tmcv1.SubscribeRequest) {
			select {
			case <-r.free:
				request.Credit = 1
			case <-ctx.Done():
				return
			}
			for ; len(r.free) > 0; request.Credit++ {
				<-r.free
			}
			asked.Add(int64(request.Credit))
			if stream.Send(request) != nil {
				return // Recv says why
			}
		}
	})
	for {
		response, err := stream.Recv()
		if err != nil {
			return got, refused(err)
		}
		got = true
		for _, d := range response.Deliveries {
			m := &Copy{
				MessageID: d.MessageId, Topic: d.Topic, Key: d.Key, Producer: d.Producer, Subscriber: d.Subscriber, Body: d.Body,
				ContentType: d.ContentType, Headers: d.Headers, Attempt: d.Attempt, Redelivered: d.Redelivered,
				Interval: time.Duration(d.RetryIntervalMs) * time.Millisecond,
			}
			asked.Add(-1)
			r.busy.Go(func() {
				r.handle(m)
				r.free <- struct{}{}
			})
		}
	}
}

// handle has a copy handled and answered for. It returns when the center knows, or when it need not.
func (r *receiver) handle(m *Copy) {
	handler := r.consumer.Handlers[m.Topic]
	if handler == nil { // of a queue that several topics share; another instance may have one
		r.answer(m, fmt.Errorf("this service has no handler for the topic %s: %w", m.Topic, Later(time.Minute)))
		return
	}
	run := mathrand.Int64()>>1 + 1
	if m.Redelivered && !r.mayBegin(m, run) {
		return
	}
	ctx, end := context.WithCancelCause(r.handling)
	defer end(nil)
	go r.extend(ctx, end, m, run, m.Redelivered)
	err := r.recovering(ctx, handler, m)
	isOthers := hasReason(context.Cause(ctx), tmcv1.Reason_ATTEMPT_STALE)
	end(nil)
	if err != nil && isOthers {
		return // another run answers for the message
	}
	r.answer(m, err)
}

func (r *receiver) recovering(ctx context.Context, handler Handler, m *Copy) (err error) {
	defer func() {
		if caught := recover(); caught != nil {
			err = fmt.Errorf("panic: %v", caught)
			r.client.log.Error("tmc: a handler panicked", "message_id", m.MessageID, "panic", caught, "stack", string(debug.Stack()))
		}
	}()
	if err = handler(ctx, m); err != nil {
		_ = err.Error() // of a nil pointer it panics: here that is caught
	}
	return err
}

func (r *receiver) answer(m *Copy, err error) {
	rejected, postponed := (*rejection)(nil), (*later)(nil)
	switch {
	case err == nil:
		r.say(m, func() (*tmcv1.ItemError, error) {
			result, err := r.acks.ask(r.ctx, &tmcv1.AckRequest{MessageId: m.MessageID, Attempt: m.Attempt})
			return result.GetError(), err
		})
	case errors.As(err, &postponed):
		if errors.Is(err, errInbox) {
			r.client.log.Error("tmc: the inbox cannot be used", "topic", m.Topic, "message_id", m.MessageID, "error", err)
			sleep(r.ctx, postponed.after) // the next ones would find the same
		}
		after := postponed.after.Milliseconds()
		r.nack(m, &tmcv1.NackRequest{Error: shortened(err.Error()), RetryAfterMs: &after})
	default:
		r.client.log.Warn("tmc: a handler failed", "message_id", m.MessageID, "topic", m.Topic, "attempt", m.Attempt, "error", err)
		r.nack(m, &tmcv1.NackRequest{Error: shortened(err.Error()), Reject: errors.As(err, &rejected)})
	}
}

func (r *receiver) nack(m *Copy, request *tmcv1.NackRequest) {
	request.MessageId, request.Attempt = m.MessageID, m.Attempt
	r.say(m, func() (*tmcv1.ItemError, error) {
		result, err := r.nacks.ask(r.ctx, request)
		return result.GetError(), err
	})
}

// say repeats an answer until the center has it. A refusal means that the copy is somebody else's now, or not ours.
func (r *receiver) say(m *Copy, call func() (*tmcv1.ItemError, error)) {
	_, err := repeated(r.ctx, r.client.log, func() (struct{}, error) {
		refused, err := call()
		if err == nil {
			err = refusal(refused)
		}
		return struct{}{}, err
	})
	if err != nil {
		r.client.log.Info("tmc: the answer for a copy was not taken", "message_id", m.MessageID, "attempt", m.Attempt, "error", err)
	}
}

// mayBegin asks before a copy that another process may have begun.
func (r *receiver) mayBegin(m *Copy, run int64) bool {
	_, err := repeated(r.ctx, r.client.log, func() (struct{}, error) { return struct{}{}, r.extendOnce(m, run) })
	if err != nil {
		r.client.log.Info("tmc: a copy is not begun", "message_id", m.MessageID, "attempt", m.Attempt, "error", err)
	}
	return err == nil
}

func (r *receiver) extendOnce(m *Copy, run int64) error {
	result, err := r.extends.ask(r.ctx, &tmcv1.ExtendRequest{
		MessageId: m.MessageID, Attempt: m.Attempt, ExtendMs: max(m.Interval.Milliseconds(), 1), Run: run,
	})
	if err != nil {
		return err
	}
	return refusal(result.Error)
}

// extend keeps a message while its handler runs. It ends the handler when the message is another run's.
func (r *receiver) extend(ctx context.Context, end context.CancelCauseFunc, m *Copy, run int64, isExtended bool) {
	for {
		if isExtended && !sleep(ctx, max(m.Interval/3, 10*time.Millisecond)) {
			return
		}
		isExtended = true
		err, refused := r.extendOnce(m, run), (*Error)(nil)
		if errors.As(err, &refused) && refused.Reason == tmcv1.Reason_ATTEMPT_STALE {
			end(err)
			return
		}
	}
}

// results makes a call of many items, which answers each.
func results[Q any, R interface{ GetResults() []A }, A any](
	ctx context.Context, call func(context.Context, Q, ...grpc.CallOption) (R, error), request Q,
) ([]A, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	response, err := call(ctx, request)
	if err != nil {
		return nil, lost(err)
	}
	return response.GetResults(), nil
}

// shortened returns text that can be sent: UTF-8 of 500 characters at most.
func shortened(text string) string {
	found := []rune(strings.ToValidUTF8(text, "?"))
	return string(found[:min(len(found), 500)])
}
